"""What would a strategy have decided about rollouts that were logged? No trainer and no GPU.

``logged_batch`` gives logged rows the look of a step's batch, ``replay`` runs plugins over them, ``compared`` counts.
"""
