"""Training of Medusa heads on a frozen target: Medusa-1 (Cai et al. 2024, arXiv 2401.10774).

Head k's loss weighs 0.8^k. The paper's labels are the text's tokens (``hard_cross_entropy``); here they are by default
the target's whole distributions, which the feature files give for one product.
"""

from __future__ import annotations

from outrider.training.objectives.per_depth import PerDepthObjective


class MedusaObjective(PerDepthObjective):
    """Medusa-1, with the base's defaults."""
