"""Interfaces of stored weights, resident weights and weight formats.

A *stored* weight lists the bytes to read for each use. `bind` creates a *resident* weight as views of these bytes, and
`linear` multiplies with it. Quantised matrices are dequantised for each use, unless their format has a faster method.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends import products
from offspec.backends.on_gpu import FUSED_ROWS, on_device, row_kernels
from offspec.backends.x86.row_product import ProductJob, RowProduct

from ..files.checkpoint import Checkpoint, TensorInfo, fault, reading, show
from ..files.records import ALIGNMENT
from ..params import ConvertParams

DAMAGED = "the checkpoint is damaged, download it again"
REMEDY = "use the 16-bit checkpoint, a bitsandbytes 4-bit one, or make one with `offspec quantize`"

# Elements dequantised at once. The kernel allocates its result: the allocator's pool has 2 MiB, but a whole matrix of
# 117 MB needs fresh pages each time: 16 ms of CPU instead of 64.
TILE = 1 << 20
TILE_ON_CUDA = 1 << 24  # larger, because launches dominate
SLICE = 1 << 26  # of a packed head on a GPU: the memory for its unpacked numbers, 128 MiB in 16 bits


# ---------------------------------------------------------------------------------------------------- resident weights


class Product(Protocol):
    """x [..., K], bias [N] in x's dtype, scratch (see `linear`) → [..., N]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor: ...


class PackedWeight(Protocol):
    """A matrix in another layout than torch multiplies: quantised, in its stored parts, or reordered (`blocked`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]: outputs, inputs."""
        ...

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K] in `dtype`; in the memory of `out` (contiguous, of that shape and dtype) if given."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """x [..., K] times the matrix, plus bias [N] (in x's dtype) → [..., N]; scratch as for `linear` below."""
        ...

    @property
    def fused_linear(self) -> Product | None:
        """`linear` without dequantising, which is faster for few rows; None if no such kernel exists."""
        ...

    @property
    def unpacked_dtype(self) -> torch.dtype:
        """A dtype that holds all numbers of the matrix: bf16 if they are bf16's, else fp32."""
        ...

    def is_recordable(self, dtype: torch.dtype) -> bool:
        """Whether a CUDA graph may record its use with rows of `dtype`: kernels alone, no choice of a method."""
        ...


Weight: TypeAlias = Tensor | PackedWeight


@runtime_checkable
class PackedTable(PackedWeight, Protocol):
    """A packed matrix that gives access to single rows: an embedding."""

    @property
    def device(self) -> torch.device: ...

    def take(self, indices: Tensor) -> PackedWeight:
        """The matrix [T, K] of these rows; indices: int64 [T], on its device."""
        ...


Table: TypeAlias = Tensor | PackedTable


Kernel: TypeAlias = tuple[RowProduct, list[Tensor]]  # and its arguments


class Launched(NamedTuple):
    """What tells two matrices apart in a kernel's launch. kind: what is equal where just the addresses differ."""

    kind: Hashable
    addresses: tuple[int, ...]


class PackedMatrix:
    """Base of most packed weights: dequantises for each product, unless a kernel was measured to be faster.

    form: the key for the costs of its products (`products.ProductKind`). unpacked_dtype: one that holds its numbers.
    """

    form = ""
    unpacked_dtype = torch.float32

    @cached_property
    def launched(self) -> Launched:
        """What a launch of its kernel is told of it."""
        parts = () if self.kernel is None else self.kernel[1]
        shape: tuple[int, ...] = self.shape  # type: ignore[attr-defined]  # a PackedWeight's
        return Launched((self.form, shape), tuple(part.data_ptr() for part in parts))

    @property
    def fused_linear(self) -> Product | None:
        return None

    def is_recordable(self, dtype: torch.dtype) -> bool:
        return False

    @property
    def address(self) -> int | None:
        """Where all of its bytes lie, one row of the matrix after another; None if there is no such place."""
        return None

    @property
    def kernel(self) -> tuple[RowProduct, list[Tensor]] | None:
        """The CPU kernel that multiplies with the packed matrix, and its arguments; None if there is none."""
        return None

    def exact_kernel(self, dtype: torch.dtype) -> Kernel | None:
        """The kernel for rows of a dtype inside `products.exact_rows`, and its arguments; None: the plain matrix's."""
        kernel = self.kernel
        return None if kernel is None else (products.exact_kernel(kernel[0], dtype), kernel[1])

    def linear(self: PackedWeight, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if (fused := _chosen_fused(self, x)) is not None:
            return fused(x, bias, scratch)
        if (kernel := _kernel_for(x, self)) is not None:
            product, parts = kernel
            return products.plus(product(x, parts, self.shape[0]), bias)
        return linear(x, dense(self, x.dtype, scratch), bias)


class ProductOfUnpacked(torch.autograd.Function):
    """x [..., K] times a matrix [N, K] that is unpacked or converted, again for the gradient of x.

    Autograd's own would keep such a copy for each product until then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Weight) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, dense(matrix, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ dense(ctx.matrix, gradient.dtype), None


def _chosen_fused(matrix: Any, x: Tensor) -> Product | None:
    """The product on a GPU that does not dequantise, if it was measured to be faster; otherwise None.

    It splits its sums by the number of rows, so exact ones are dequantised.
    """
    if products.must_be_exact(x):
        return None
    most = FUSED_ROWS.get(matrix.form, matrix.shape, x.dtype, x.device)
    if not 0 < products.rows_of(x) <= most or _needs_gradients(x):
        return None
    fused: Product | None = matrix.fused_linear
    return fused


def _needs_gradients(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _chosen_kernel(matrix: Any, x: Tensor) -> tuple[RowProduct, list[Tensor]] | None:
    """The kernel, if it was measured to be faster than dequantising, or rows must be exact; otherwise None."""
    if not x.numel() or x.shape[-1] != matrix.shape[1] or _needs_gradients(x):
        return None
    if products.must_be_exact(x):
        exact: Kernel | None = matrix.exact_kernel(x.dtype)
        return exact
    kind = products.ProductKind.of(matrix.form, x.dtype, math.prod(matrix.shape))
    if products.COSTS.method(kind, products.rows_of(x)) != products.KERNEL:
        return None
    kernel: Kernel | None = matrix.kernel
    return kernel


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] → [..., N] in x's dtype.

    scratch: at least N·K elements of x's dtype, 1-D, for a matrix that must be dequantised or converted first; without
    it, memory is allocated each time.
    """
    bias = bias if bias is None else bias.to(x.dtype)
    if _needs_gradients(x) and _is_unpacked_for(x, weight):
        product: Tensor = ProductOfUnpacked.apply(x, weight)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias
    if bias is not None and bias.is_cuda and bias.data_ptr() % ALIGNMENT:
        bias = bias.clone()  # cuBLASLt may select a kernel that needs an aligned bias (pytorch#194497)
    if not isinstance(weight, Tensor):
        return weight.linear(x, bias, scratch)
    if weight.device.type == "cpu":
        return products.multiply(x, weight, bias, scratch)
    if weight.dtype != x.dtype:
        weight = dense(weight, x.dtype, scratch)
    if products.must_be_exact(x):
        return products.plus(exact_on_gpu(x, weight), bias)
    return F.linear(x, weight, bias)


def _is_unpacked_for(x: Tensor, weight: Weight) -> bool:
    """Whether a product with x needs a copy of the weight; one that learns is converted by autograd itself."""
    return not isinstance(weight, Tensor) or (weight.dtype != x.dtype and not weight.requires_grad)


def linears(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], scratch: Tensor | None = None
) -> list[Tensor]:
    """`linear` of x [..., K] by several weights; on a CPU in one call, if one kernel multiplies each of them."""
    kernels = [kernel for weight in weights if (kernel := _kernel_for(x, weight)) is not None]
    if len(kernels) < len(weights) or len({id(product) for product, _ in kernels}) > 1:
        return [linear(x, weight, bias, scratch) for weight, bias in zip(weights, biases, strict=True)]
    rows, sizes = x.reshape(-1, x.shape[-1]), [weight.shape[0] for weight in weights]
    jobs = [ProductJob(parts, size, 0, len(rows)) for (_, parts), size in zip(kernels, sizes, strict=True)]
    results = torch.split(kernels[0][0].each(rows, jobs), [len(rows) * size for size in sizes])
    shaped = [each.view(*x.shape[:-1], size) for each, size in zip(results, sizes, strict=True)]
    cast = [bias if bias is None else bias.to(x.dtype) for bias in biases]
    return [products.plus(each, bias) for each, bias in zip(shaped, cast, strict=True)]


def linear_each(x: Tensor, counts: Sequence[int], weights: Sequence[Weight], scratch: Tensor | None = None) -> Tensor:
    """x [R, K] times several weights [N, K], of which each multiplies `counts` rows → [sum of counts, N] in x's dtype.

    Each multiplies the next rows, and after the last row the first ones again: one row may be that of all. On a CPU all
    are multiplied in one call, if kernels multiply each of them alone. scratch: as for `linear`.
    """
    num_rows = x.shape[0]
    firsts = [first % max(1, num_rows) for first in accumulate(counts[:-1], initial=0)]
    if (kernel := _common_kernel(x, counts, weights)) is not None:
        product, matrices = kernel
        num_outputs = weights[0].shape[0]
        jobs = [ProductJob(parts, num_outputs, *rows) for parts, *rows in zip(matrices, firsts, counts, strict=True)]
        return product.each(x, jobs).view(-1, num_outputs)
    each = zip(firsts, counts, weights, strict=True)
    return torch.cat([linear(x[first : first + count], weight, None, scratch) for first, count, weight in each])


def _common_kernel(
    x: Tensor, counts: Sequence[int], weights: Sequence[Weight]
) -> tuple[RowProduct, list[list[Tensor]]] | None:
    """The kernel that multiplies each of the weights with its rows, and their parts; None if it is not one for all."""
    if len(weights) < 2:
        return None
    first, most = weights[0], x[: max(counts)]
    if (chosen := _kernel_for(most, first)) is None:
        return None
    if isinstance(first, PackedMatrix):  # the choice is one of form, shape and rows
        form = first.form
        kernels = [each.kernel for each in weights if isinstance(each, PackedMatrix) and each.form == form]
        product = kernels[0] and kernels[0][0]
    else:
        kernels, product = [_kernel_for(most, weight) for weight in weights], chosen[0]
    parts = [kernel[1] for kernel in kernels if kernel is not None and kernel[0] is product]
    return (chosen[0], parts) if len(parts) == len(weights) else None


def _kernel_for(x: Tensor, weight: Weight) -> Kernel | None:
    """The kernel that multiplies rows x on a CPU with the weight; None if another method does."""
    if x.device.type != "cpu":
        return None
    if isinstance(weight, Tensor):
        return products.chosen_kernel(x, weight)
    return _chosen_kernel(weight, x) if isinstance(weight, PackedMatrix) else None


def linear_fp32(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """As `linear`, with an fp32 result [..., N].

    On a GPU the sums are not rounded to x's dtype first, where torch can (2.8 and newer), if the matrix is plain or is
    dequantised for the product, and no gradient is wanted; nor by kernels on a CPU, nor of exact rows. Other products
    are rounded first.
    """
    if _is_sliced(x, weight, scratch):
        assert isinstance(weight, PackedTable)
        return products.plus(_by_slices(x, weight), bias)
    if products.must_be_exact(x) and x.device.type != "cpu":
        return products.plus(exact_on_gpu(x, dense(weight, x.dtype, scratch), torch.float32), bias)
    is_half, is_plain = x.dtype in products.HALF_DTYPES, isinstance(weight, Tensor)
    is_product_of_torch = is_plain or (isinstance(weight, PackedMatrix) and _chosen_fused(weight, x) is None)
    if x.is_cuda and is_half and has_fp32_output() and is_product_of_torch and not torch.is_grad_enabled():
        product = torch.mm(x, dense(weight, x.dtype, scratch).t(), out_dtype=torch.float32)
        return product if bias is None else product + bias
    if (kernel := _kernel_for(x, weight)) is not None:
        multiply, parts = kernel
        return products.plus(multiply(x, parts, weight.shape[0], torch.float32), bias)
    if products.must_be_exact(x):  # a matrix in memory was converted when it was loaded
        return products.plus(products.multiply_exactly(x, dense(weight, x.dtype, scratch), torch.float32), bias)
    return linear(x, weight, bias, scratch).float()


def _is_sliced(x: Tensor, weight: Weight, scratch: Tensor | None) -> bool:
    """Whether a large table on a GPU is unpacked for this product, and there is no memory planned for all of it."""
    if x.device.type == "cpu" or scratch is not None or isinstance(weight, Tensor):
        return False
    is_large = math.prod(weight.shape) > SLICE and isinstance(weight, PackedTable)
    return is_large and _chosen_fused(weight, x) is None


def _by_slices(x: Tensor, table: PackedTable) -> Tensor:
    """`linear_fp32` by some of the table's rows [N, K] at a time."""
    num_rows, num_inputs = table.shape
    height = max(1, SLICE // num_inputs)
    out = x.new_empty(*x.shape[:-1], num_rows, dtype=torch.float32)
    for first in range(0, num_rows, height):
        some = torch.arange(first, min(first + height, num_rows), device=table.device)
        out[..., first : first + len(some)] = linear_fp32(x, table.take(some).dequantize(x.dtype))
    return out


def slice_elements(shape: Sequence[int]) -> int:
    """Elements of a packed head of this shape that are unpacked at a time on a GPU."""
    return min(math.prod(shape), SLICE)


def exact_on_gpu(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] times a plain weight [N, K] of its dtype by `backends.triton.rows` → [..., N] in `dtype`, or x's."""
    kernels = row_kernels()
    assert kernels is not None, "exact rows without kernels"
    with on_device(x.device):
        product: Tensor = kernels.multiply(x, weight.contiguous(), dtype)
    return product


@cache
def has_fp32_output() -> bool:
    """Whether torch's products on a GPU can have fp32 results for 16-bit inputs."""
    return hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


def dense(weight: Weight, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
    """The weight as a plain tensor of `dtype`; a converted one is in `scratch` (1-D, of that dtype) if given."""
    if isinstance(weight, Tensor) and (scratch is None or weight.dtype == dtype):
        return weight.to(dtype)
    out = None if scratch is None else scratch[: math.prod(weight.shape)].view(weight.shape)
    if not isinstance(weight, Tensor):
        return weight.dequantize(dtype, out)
    assert out is not None
    return out.copy_(weight)


def as_table(weight: Weight) -> Table:
    """A weight that gives access to single rows."""
    assert isinstance(weight, Tensor | PackedTable), "the format has no access to single rows"
    return weight


def take_rows(table: Table, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, K] of a table [N, K], in `dtype`; indices: int64 [T], on its device."""
    if isinstance(table, Tensor):
        return F.embedding(indices, table).to(dtype)
    return table.take(indices).dequantize(dtype)


def tile(device: torch.device) -> int:
    """Elements to dequantise at a time."""
    return TILE_ON_CUDA if device.type == "cuda" else TILE


# ------------------------------------------------------------------------------------------------------ stored weights


class StoredWeight(Protocol):
    """One logical weight of a checkpoint: the tensors to read for each use, and their conversion to a matrix."""

    @property
    def name(self) -> str:
        """Its key, with or without a layer's prefix: "mlp.up_proj.weight"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: [N, K] even if it is stored as [N·K/2, 1]."""
        ...

    @property
    def dtype(self) -> str:
        """The stored dtype, for notes and plans: "F64", "F32", "F16", "BF16", or its format's name: "nf4", "awq"."""
        ...

    @property
    def streamed(self) -> tuple[TensorInfo, ...]:
        """The parts to read for each use; constants are already in memory."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether it must be dequantised for each use."""
        ...

    @property
    def plain_dtype(self) -> str | None:
        """The stored dtype of the plain tensor with the same bits, "BF16"; None if it is quantised."""
        ...

    @property
    def fused_kind(self) -> Hashable | None:
        """A key for the speed of its `fused_linear`, besides the dtype of x; None if its format has none."""
        ...

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        """Whether a resident weight for computing in `dtype` consists of the bytes read."""
        ...

    def bind(self, parts: Sequence[Tensor]) -> Weight:
        """The weight over raw bytes: one uint8 [nbytes] for each of `streamed`, in that order, all on one device.

        Returns views of `parts`; a copy only if a part is not aligned to its dtype.
        """
        ...

    def sample(self, device: torch.device) -> Weight:
        """A weight of this shape and layout over arbitrary bytes, for measurements."""
        ...

    def to(self, device: torch.device | str) -> StoredWeight:
        """The same weight with its constants on `device`, where the parts will be bound."""
        ...


@runtime_checkable
class StoredTable(StoredWeight, Protocol):
    """A stored weight with consecutive rows in its only part, so that single rows can be read."""

    def bind_rows(self, rows: Tensor) -> Weight:
        """The weight [T, K] over the bytes of T of its rows: uint8 [T, bytes of a row], contiguous."""
        ...


class PackedStored:
    """Base of most packed stored weights: all data are in `streamed`, and are kept as read."""

    is_packed = True
    plain_dtype: str | None = None

    @property
    def fused_kind(self) -> Hashable | None:
        return None

    def is_kept_as_read(self, dtype: torch.dtype) -> bool:
        return True

    def sample(self: StoredWeight, device: torch.device) -> Weight:
        return self.to(device).bind([any_bytes(info.nbytes, device) for info in self.streamed])

    def to(self: StoredWeight, device: torch.device | str) -> StoredWeight:
        return self


def any_bytes(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] of arbitrary values."""
    return torch.arange(256, dtype=torch.uint8).mul_(37).to(device).repeat(-(-nbytes // 256))[:nbytes]


# ------------------------------------------------------------------------------------------------------------- formats


@dataclass
class TensorGroup:
    """The tensors of one logical weight by part name ("" is the weight itself), and the contents of small ones.

    contents: of the parts that the format's `constant_bytes` requests.
    """

    name: str
    parts: dict[str, TensorInfo] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def weight(self) -> TensorInfo:
        """The part "". Raises CheckpointError if it is missing."""
        if "" not in self.parts:
            part, info = next(iter(self.parts.items()))
            self.refuse(info, f"is missing, but its {show(part)} exists; {DAMAGED}")
        return self.parts[""]

    def refuse(self, info: TensorInfo, problem: str) -> NoReturn:
        raise fault(info.path, f"weight {show(self.name)} {problem}")

    def companion(self, part: str) -> TensorInfo:
        """A part. Raises CheckpointError if it is missing."""
        if part not in self.parts:
            self.refuse(self.weight, f"lacks its {part}; {DAMAGED}")
        return self.parts[part]

    def expect(self, part: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a part of another dtype or shape."""
        info = self.parts[part]
        if (info.dtype, info.shape) != (dtype, shape):
            stored, wanted = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(shape)}"
            self.refuse(info, f"has a {part} that is {stored}, not {wanted}; {DAMAGED}")


Allocate: TypeAlias = Callable[[str, str, tuple[int, ...]], TensorInfo]  # name, dtype, shape → its place in a file


class Packer(Protocol):
    """Writes a format for `offspec quantize`, with the settings of one run."""

    @property
    def is_lossless(self) -> bool:
        """Whether it packs bf16 matrices alone, keeps their bits, and returns those that would not shrink as they are,
        under the weight's own name.
        """
        ...

    def prepare(self) -> None:
        """Raises OffspecError if a package that packing needs is missing."""
        ...

    def for_shape(self, shape: tuple[int, ...]) -> Packer | None:
        """The packer for a matrix of this shape; None if the matrix is kept unchanged."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The name suffix of each tensor of a weight; "" for the weight itself."""
        ...

    def num_bytes(self, elements: int) -> int:
        """Bytes of a matrix with this number of elements in a file, or an upper bound of them."""
        ...

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight [N, K] (bf16, fp16 or fp32, on the CPU) → suffix → tensor. Raises CheckpointError if it cannot."""
        ...

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """The quantization_config for config.json, for source weights of `dtype` ("BF16")."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Versions, by name, of the packages that the result's bits depend on."""
        ...


class WeightFormat(ABC):
    """One way to store weights. Each is registered once, in `registry.FORMATS`.

    names: the values of `StoredWeight.dtype` of its weights. plan_forms: the `params.PLAN_FORMATS` that it sizes.
    outside_layers: the form of weights outside the layers in a plan; None is the same form. notes: for the user who
    loads such a checkpoint, one sentence each.
    """

    names: tuple[str, ...] = ()
    plan_forms: tuple[str, ...] = ()
    outside_layers: str | None = None
    notes: tuple[str, ...] = ()

    def in_checkpoint(self, checkpoint: Checkpoint) -> WeightFormat | None:
        """The format with the settings of this checkpoint's config; None if the config excludes this format.

        Raises UnsupportedModelError, CheckpointError.
        """
        return self

    def companion(self, key: str) -> tuple[str, str] | None:
        """(weight's name, part) of a tensor whose name belongs to a weight of this format, or None."""
        return None

    @abstractmethod
    def recognises(self, group: TensorGroup) -> bool:
        """Whether these tensors are a weight of this format, valid or not, before their contents are read."""

    def constant_bytes(self, part: str) -> int:
        """The maximum number of bytes of this part to read when a checkpoint is opened; 0: none."""
        return 0

    @abstractmethod
    def read(self, group: TensorGroup) -> StoredWeight:
        """Check the tensors and build the weight. Raises CheckpointError."""

    def blank_tensors(self, infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
        """Names of tensors without content that tools of this format write, except those in `wanted`."""
        return set()

    def plan_form(self, config: Mapping[str, Any]) -> str | None:
        """The form of `params.PLAN_FORMATS` for a plan of a checkpoint with this config.json, or None."""
        return None

    def sized(self, form: str, name: str, shape: tuple[int, ...], allocate: Allocate) -> StoredWeight | None:
        """A weight as this format would store it (as `form`, one of its names or plan_forms); None if unknown.

        It is never read. It serves plans from config.json alone, and measurements (`StoredWeight.sample`).
        """
        return None

    def prepare(self) -> None:  # noqa: B027 (most formats need nothing)
        """Import the packages for its arithmetic on a CPU. Raises OffspecError if one is missing."""

    def packer(self, params: ConvertParams) -> Packer | None:
        """The packer for `params.format`; None if another format writes it."""
        return None


# ------------------------------------------------------------------------------------------------------- small contents


def read_small(most: Mapping[TensorInfo, int]) -> dict[TensorInfo, bytes]:
    """The contents of tensors, up to the given number of bytes each, read in file order.

    Raises CheckpointError. The format refuses a part that is too long by its shape, or as JSON.
    """
    wanted = sorted(most, key=lambda info: (info.path, info.offset))
    contents: dict[TensorInfo, bytes] = {}
    for path, pieces in groupby(wanted, key=lambda info: info.path):
        with reading(path), path.open("rb") as file:
            for info in pieces:
                nbytes = min(info.nbytes, most[info])
                file.seek(info.offset)
                content = file.read(nbytes)
                if len(content) < nbytes:
                    description = f"ends inside tensor {show(info.name)}: the file was changed; download it again"
                    raise fault(info.path, description)
                contents[info] = content
    return contents
