"""Metrics of a run that never was, with everything that a report shows."""

from __future__ import annotations

from typing import Any

import numpy as np

DOMAINS = ("gsm8k", "code", "logic", "science", "word.20problems", "openai:gsm8k", "mi-nerva", "algebra")


def full_run(steps: int, domains: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    names = DOMAINS[:domains]
    records: list[dict[str, Any]] = []
    for step in range(steps + 1):
        share = step / steps
        data: dict[str, float] = {}
        if step % max(1, steps // 20) == 0:
            data |= {f"val-core/{name}/acc/mean@4": 0.3 + 0.3 * share + random.normal(0, 0.02) for name in names}
        if step:
            target = np.exp(np.sin(np.arange(domains) + 4 * share))
            target /= target.sum()
            generated = random.multinomial(256, target)
            trained = random.binomial(generated, 0.6)
            kept = 0.6 + 0.2 * np.sin(6 * share)
            data |= {
                "critic/score/mean": 0.3 + 0.4 * share + random.normal(0, 0.03),
                "dataflex/reward_all": 0.3 + 0.4 * share + random.normal(0, 0.03),
                "dataflex/reward_kept": 0.4 + 0.3 * share + random.normal(0, 0.03),
                "actor/grad_norm": 1.0 + random.random(),
                "dataflex/kept_frac": kept,
                "dataflex/difffilter/kept_frac": kept,
                "dataflex/difffilter/masked_rows_total/group_solve_rate:threshold_band": 900 * (1 - kept),
                "dataflex/overlong/dropped_rows_total/truncated": 200 * (1 - kept),
                "dataflex/weight_mean": kept,
                "dataflex/weight_std": 0.5,
                "dataflex/weight_largest": 3.0,
                "dataflex/ess_frac": kept * 0.8,
                "dataflex/applied": 1.0,
                "timing_s/gen": 20 + random.normal(),
                "timing_s/old_log_prob": 5.0,
                "timing_s/update_actor": 12.0,
                "timing_s/step": 40.0,
                "timing_s/dataflex": 0.2,
                "perf/total_num_tokens": 1e6,
            }
            for index, name in enumerate(names):
                data[f"dataflex/prop_{name}"] = target[index]
                data[f"dataflex/generated_{name}"] = generated[index] / 256
                data[f"dataflex/trained_{name}"] = trained[index] / max(1, trained.sum())
                data[f"dataflex/reward_{name}"] = 0.2 + 0.3 * share + random.normal(0, 0.04)
        records.append({"step": step, "data": {name: float(value) for name, value in data.items()}})
    return records
