"""Convolution and max pooling on any array module, through one view of the image's patches.

The view is ``_patches``: (N, C, kh, kw, Ho, Wo). Everything works for any stride, padding, dilation
and number of groups, and is as fast as strided views and batched matrix products make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extensor.backends.generic.quantize import GenericQuantize
from extensor.backends.protocol import Array, FirstSpec, Window
from extensor.quant.hadamard import hadamard, inverse_hadamard
from extensor.quant.recipe_state import Counts
from extensor.quant.reference import masked
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["GenericConvPool", "check_max_windows", "fold", "patch_matrix", "patches_grad"]


class GenericConvPool(GenericQuantize):
    """Convolutions, of floats or with quantized patches, and max pooling."""

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """See the protocol."""
        xp = self.xp
        patches = _patches(x, window, xp)
        n, c, kh, kw, ho, wo = patches.shape
        outputs, inner = w.shape[0], c // groups * kh * kw
        columns = patches.reshape(n, groups, inner, ho * wo)
        out = xp.matmul(w.reshape(groups, outputs // groups, inner), columns)
        out = out.reshape(n, outputs, ho, wo)
        if bias is not None:
            out += bias[:, None, None]
        return out

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        xp = self.xp
        return fold(patches_grad(g, w, shape, window, groups, xp), shape, window, xp)

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        # One long GEMM per group over all images and pixels, not one short one per image.
        columns = patch_matrix(x, window, groups, self.xp)
        rows = g.transpose(1, 0, 2, 3).reshape(groups, shape[0] // groups, columns.shape[2])
        return self.xp.matmul(rows, columns.swapaxes(1, 2)).reshape(shape)

    def quantized_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        xp = self.xp
        values, stats = self._patches_operand(x, spec, stream, shape, window)
        ho, wo = window.output_size(x.shape[2:])
        out = xp.matmul(w, values).reshape(shape[0], x.shape[0], ho, wo)
        out = xp.ascontiguousarray(xp.swapaxes(out, 0, 1))
        if bias is not None:
            out += bias[:, None, None]
        return out, stats

    def quantized_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        first: FirstSpec | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        xp = self.xp
        values, stats = self._patches_operand(x, spec, stream, shape, window, first)
        gradient = xp.matmul(g, xp.swapaxes(values, -1, -2))
        return gradient if first is not None else gradient.reshape(shape), stats

    def clipped_conv2d_grad_x(
        self,
        g: Array,
        w: Array,
        x: Array,
        spec: QuantSpec,
        window: Window,
        clips: bool = True,
    ) -> Array:
        """See the protocol."""
        xp, gradient = self.xp, self.xp.matmul(w.T, g)
        patches = patch_matrix(x, window, 1, xp)[0]
        if clips:
            mask = self.quantize_clipped(xp.ascontiguousarray(patches), spec)[2]
            gradient = masked(gradient, mask, spec.axis, xp)
        if spec.transform:
            gradient = inverse_hadamard(gradient.T, spec.transform, len(patches), xp).T
        (n, c), (ho, wo) = x.shape[:2], window.output_size(x.shape[2:])
        shape = (c, *window.kernel, n, ho, wo)
        return fold(xp.moveaxis(gradient.reshape(shape), 3, 0), x.shape, window, xp)

    def _patches_operand(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        first: FirstSpec | None = None,
    ) -> tuple[Array, Counts]:
        groups = x.shape[1] // shape[1]
        patches = patch_matrix(x, window, groups, self.xp)
        patches = patches if groups > 1 else patches[0]
        return self.fake_quantize(first_values(self, patches, first), spec, stream)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol."""
        xp = self.xp
        n, c, h, w = x.shape
        ho, wo = check_max_windows(window, (h, w))
        best = xp.zeros((n, c, ho, wo), dtype=x.dtype)
        index = xp.full((n, c, ho, wo), -1, dtype=xp.int32)
        # Padding is only a mask: its value never takes part, so the -inf of an image can win.
        padded = _pad(x, window, xp)
        (top, left), (sh, sw) = window.padding, window.stride
        for _, (dy, dx), rows, columns in _taps(window, (ho, wo)):
            y = xp.arange(ho, dtype=xp.int32)[:, None] * sh + (dy - top)
            column = xp.arange(wo, dtype=xp.int32)[None, :] * sw + (dx - left)
            inside = (y >= 0) & (y < h) & (column >= 0) & (column < w)
            value = padded[:, :, rows, columns]
            better = (value > best) | (index < 0) | (xp.isnan(value) & ~xp.isnan(best))
            take = better & inside
            best = xp.where(take, value, best)
            index = xp.where(take, y * w + column, index)
        return best, index.astype(xp.int32, copy=False)

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """See the protocol."""
        xp = self.xp
        n, c, h, w = shape
        out = xp.zeros(n * c * h * w, dtype=g.dtype)
        plane = xp.arange(n * c, dtype=xp.int64)[:, None] * (h * w)
        within = xp.asarray(index).reshape(n * c, g.shape[2] * g.shape[3])
        xp.add.at(out, (plane + within).reshape(-1), g.reshape(-1))
        return out.reshape(shape)


def patch_matrix(x: Array, window: Window, groups: int, xp: Any) -> Array:
    """(N, C, H, W), zero-padded -> (groups, C / groups * kh * kw, N * Ho * Wo).

    A column is a patch; its values come in the order (C / groups, kh, kw).
    """
    patches = _patches(x, window, xp)
    n, c, kh, kw, ho, wo = patches.shape
    return patches.transpose(1, 2, 3, 0, 4, 5).reshape(groups, c // groups * kh * kw, n * ho * wo)


def first_values(backend: Any, patches: Array, first: FirstSpec | None) -> Array:
    """Patches (K, M) after what is done to them before they are quantized along M."""
    if isinstance(first, Hadamard):
        xp = backend.xp
        return xp.ascontiguousarray(hadamard(patches.T, first, xp).T)
    return patches if first is None else backend.fake_quantize(patches, first)[0]


def patches_grad(
    g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int, xp: Any
) -> Array:
    """Gradient of conv2d in x's patches, (N, C, kh, kw, Ho, Wo)."""
    n, outputs, ho, wo = g.shape
    kh, kw = window.kernel
    weight = w.reshape(groups, outputs // groups, shape[1] // groups * kh * kw).swapaxes(1, 2)
    columns = xp.matmul(weight, g.reshape(n, groups, outputs // groups, ho * wo))
    return columns.reshape(n, shape[1], kh, kw, ho, wo)


def fold(patches: Array, shape: tuple[int, ...], window: Window, xp: Any) -> Array:
    """Sum (N, C, kh, kw, Ho, Wo) back to ``shape``: the transpose of ``_patches``."""
    n, c, h, w = shape
    ph, pw = window.padding
    padded = xp.zeros((n, c, h + 2 * ph, w + 2 * pw), dtype=patches.dtype)
    for (i, j), _, rows, columns in _taps(window, _output_size(window, (h, w))):
        padded[:, :, rows, columns] += patches[:, :, i, j]
    return xp.ascontiguousarray(padded[:, :, ph : ph + h, pw : pw + w])


def check_max_windows(window: Window, size: tuple[int, int]) -> tuple[int, int]:
    """Output size of max pooling an image of ``size``.

    Raises:
        ValueError: if the window does not fit, or some window would hold padding only.
    """
    out = _output_size(window, size)
    if window.padding == (0, 0):
        return out
    axes = zip(
        size, out, window.kernel, window.stride, window.padding, window.dilation, strict=True
    )
    for n, windows, k, s, p, d in axes:
        for o in range(windows):
            if not any(0 <= o * s - p + t * d < n for t in range(k)):
                raise ValueError(
                    f"max_pool2d: window {o} of {window} on an image of {size} holds padding only; "
                    "use less padding"
                )
    return out


def _output_size(window: Window, size: tuple[int, int]) -> tuple[int, int]:
    ho, wo = window.output_size(size)
    if min(ho, wo) < 1:
        raise ValueError(
            f"window {window} does not fit an image of {size}: the output would be {ho} x {wo}; "
            "pad more, or use a smaller kernel or dilation"
        )
    return ho, wo


def _pad(x: Array, window: Window, xp: Any) -> Array:
    ph, pw = window.padding
    if ph == pw == 0:
        return x
    n, c, h, w = x.shape
    padded = xp.zeros((n, c, h + 2 * ph, w + 2 * pw), dtype=x.dtype)
    padded[:, :, ph : ph + h, pw : pw + w] = x
    return padded


def _patches(x: Array, window: Window, xp: Any) -> Array:
    """A view (N, C, kh, kw, Ho, Wo) of the zero-padded x: patches[..., i, j, y, x]."""
    ho, wo = _output_size(window, x.shape[2:])
    padded = _pad(x, window, xp)
    n, c = x.shape[:2]
    sn, sc, sh, sw = padded.strides
    (vh, vw), (dh, dw) = window.stride, window.dilation
    return xp.lib.stride_tricks.as_strided(
        padded, (n, c, *window.kernel, ho, wo), (sn, sc, sh * dh, sw * dw, sh * vh, sw * vw)
    )


def _taps(
    window: Window, out: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int], slice, slice]]:
    """Each kernel element (i, j): its offset, and the padded rows and columns it reads."""
    (kh, kw), (sh, sw), (dh, dw) = window.kernel, window.stride, window.dilation
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dh, i * dh + sh * (out[0] - 1) + 1, sh)
            columns = slice(j * dw, j * dw + sw * (out[1] - 1) + 1, sw)
            yield (i, j), (i * dh, j * dw), rows, columns
