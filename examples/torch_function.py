"""cunorm's batch norm in PyTorch: autograd functions around it, of tensors, differentiable twice.

python examples/torch_function.py
"""

from __future__ import annotations

import torch

import cunorm


class BatchNorm(torch.autograd.Function):
    """Of x, weight, bias, running_mean, running_var (updated in training) and training."""

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, training):
        ctx.save_for_backward(x, weight)
        plain = (x.detach(), weight.detach(), bias.detach(), running_mean, running_var)
        y, ctx.saved = cunorm.batch_norm_forward(*plain, training=training)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *BatchNormBackward.apply(dy, *ctx.saved_tensors, ctx.saved), None, None, None


class BatchNormBackward(torch.autograd.Function):
    """The gradients with respect to x, weight and bias, and what differentiates them."""

    @staticmethod
    def forward(ctx, dy, x, weight, saved):
        ctx.save_for_backward(dy, x, weight)
        ctx.saved = saved
        ctx.set_materialize_grads(False)  # None for gradients that are not asked for
        return cunorm.batch_norm_backward(dy.detach(), x.detach(), saved, weight.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        dy, x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        upstream = (None if tensor is None else tensor.detach() for tensor in upstream)
        return *cunorm.batch_norm_double_backward(*upstream, dy, x, ctx.saved, weight), None


def main():
    torch.manual_seed(0)
    arguments = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 3, 5), 3, 3)]
    running = torch.zeros(3), torch.ones(3)
    y = BatchNorm.apply(*arguments, *running, True)
    expected = torch.nn.functional.batch_norm(arguments[0], None, None, *arguments[1:], True)
    print(f"largest difference from PyTorch's own: {(y - expected).abs().max():.1e}")
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        check(lambda *a: BatchNorm.apply(*a, *running, True), arguments)
        print(f"{check.__name__} passed")


if __name__ == "__main__":
    main()
