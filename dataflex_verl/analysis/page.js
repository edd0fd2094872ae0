"use strict";
// Charts are drawn when they come near the screen, so that the page can be used at once.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const narrow = window.matchMedia("(max-width: 700px)").matches;
  function draw(place) {
    if (place.dataset.drawn) return;
    place.dataset.drawn = "yes";
    const figure = figures[Number(place.dataset.figure)];
    if (narrow) {
      // A finger that moves over a chart scrolls the page; the legend's lines come on top of the chart's height.
      figure.layout.dragmode = false;
      const named = figure.data.filter(function (trace) { return trace.showlegend !== false; }).length;
      figure.layout.height += 19 * Math.max(0, named - 2);
    }
    Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  }
  const places = document.querySelectorAll(".plot");
  if (!("IntersectionObserver" in window)) {
    places.forEach(draw);
    return;
  }
  const watch = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (!entry.isIntersecting) return;
      watch.unobserve(entry.target);
      draw(entry.target);
    });
  }, { rootMargin: "400px" });
  places.forEach(function (place) { watch.observe(place); });
  window.addEventListener("beforeprint", function () { places.forEach(draw); });
})();
