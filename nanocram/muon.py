"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon): momentum, each matrix's update made nearly orthogonal.

    python -m pytest tests/test_muon.py      # beside torch.optim.Muon

It is torch.optim.Muon, which takes one matrix after the other: with small ones the time goes into calls, not into
multiplying. Here all matrices of a shape go through each product together, in float32 where bfloat16 would be slow.
"""

from collections import defaultdict

import torch

from nanocram.machine import native_bf16

COEFFICIENTS = (
    3.4445,
    -4.775,
    2.0315,
)  # of the quintic that takes singular values from (0, 1] to about 1
STEPS = 5
EPS = 1e-7


def orthogonalise(matrices):
    """For each of matrices (N, rows, columns) about U Vᵀ of its singular value decomposition U S Vᵀ, in their dtype."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the products are cheapest with few rows
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT  # (N, rows, rows)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, decoupled weight decay, steps of lr · sqrt(max(1, rows / columns)); takes matrices alone."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "Muon takes matrices: give tables, norms and biases to another optimiser"
            )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes, momentum = defaultdict(list), group["momentum"]
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append(p)
            for (rows, columns), same in shapes.items():
                grads = [p.grad for p in same]
                for p in same:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum_buffer"] for p in same]
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
                updates = torch._foreach_lerp(grads, buffers, momentum)
                dtype = torch.bfloat16 if native_bf16(same[0].device.type) else torch.float32
                updates = orthogonalise(torch.stack([u.to(dtype) for u in updates]))
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    same,
                    updates.float().unbind(),
                    alpha=-group["lr"] * max(1, rows / columns) ** 0.5,
                )
