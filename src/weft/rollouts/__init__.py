"""Trees of rollouts for reinforcement learning: grow them, score them, train on them.

    trees = rollouts.grow(lm, prompts, n=8, branch_at="steps", max_tokens=64)
    rewards = [[reward(text) for text in tree.texts] for tree in trees]
    records = rollouts.flatten(trees, rewards)

`trl` does the same inside TRL's GRPOTrainer, over the model that is being trained.
"""

from __future__ import annotations

from .growth import grow
from .records import flatten
from .trainer import trl
from .tree import Segment, Tree

__all__ = ["Segment", "Tree", "flatten", "grow", "trl"]
