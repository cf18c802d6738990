"""Rearranges weights once, as ``matmul.h`` reads them, and quantizes them where that is asked for.

int8 is symmetric, with one scale for each output. int4 has numbers from 0 to 15 and, for each 32 inputs of an output,
in float16, what a number counts and what is added to it: the weights of a GGUF file in Q4_1 stay as they are. The
inputs become whole numbers of up to 15 bits when they are multiplied, with one scale for each row, and the sums, with
int4 those of each 32 inputs, are exact. It knows nothing of models.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from runnerd_torch.decoder.library import ProjectionFields
from runnerd_torch.native.huge_pages import Arena

Quantization = Literal["none", "int8", "int4"]

PANEL = 16
"""Outputs that lie side by side."""
GROUP = 32
"""Inputs of an int4 weight that share scales."""

FLOAT32, BFLOAT16, INT8, INT4 = range(4)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight; keep it as long as its fields are used."""

    values: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    num_inputs: int
    num_outputs: int
    weight_type: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(one.nbytes for one in (self.values, self.scales, self.bias) if one is not None)

    def moved(self, arena: Arena) -> PackedWeight:
        """Give the same with its values and scales in ``arena``."""
        scales = None if self.scales is None else arena.copy(self.scales)
        return dataclasses.replace(self, values=arena.copy(self.values), scales=scales)

    def fields(self) -> ProjectionFields:
        """Give the structure that native code reads."""
        scales, bias = (None if one is None else one.data_ptr() for one in (self.scales, self.bias))
        sizes = self.num_inputs, self.num_outputs
        return ProjectionFields(self.values.data_ptr(), scales, bias, *sizes, self.weight_type)


def inputs_multiple(quantization: Quantization) -> int:
    """Give what the inputs of a projection come in multiples of."""
    return 32 if quantization == "none" else 64  # with int4 the head is int8


def quantization_of_head(quantization: Quantization) -> Quantization:
    """Give how the output projection is quantized, whose errors nothing after it evens out."""
    return "int8" if quantization == "int4" else quantization


def pack(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization) -> PackedWeight:
    """Pack a weight.

    Args:
        weight: ``[num_outputs, num_inputs]`` float32 or bfloat16; inputs as :func:`inputs_multiple` says. Not kept.
        bias: ``[num_outputs]`` or None.
        quantization: How; "none" keeps the dtype.
    """
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    if num_outputs % PANEL:
        weight = torch.cat((weight, weight.new_zeros(num_panels * PANEL - num_outputs, num_inputs)))
    scales = None
    if quantization == "int8":
        numbers, scales = _to_int8(weight)
        values, weight_type = _in_parts(numbers, num_panels, 4), INT8
    elif quantization == "int4":
        numbers, *of_groups = _to_int4(weight)
        values, weight_type = _in_parts(_two_in_a_byte(numbers), num_panels, 4), INT4
        scales = torch.stack([_in_parts(one, num_panels, 1) for one in of_groups], dim=2)
    elif weight.dtype == torch.bfloat16:
        values, weight_type = _in_parts(weight, num_panels, 2), BFLOAT16
    else:
        values, weight_type = weight.float().view(num_panels, PANEL, num_inputs).transpose(1, 2).contiguous(), FLOAT32
    bias = None if bias is None else bias.float().contiguous()
    return PackedWeight(values, scales, bias, num_inputs, num_outputs, weight_type)


def taking_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Join two weights ``[size, num_inputs]`` so that panels of the first and of the second take turns."""
    size, num_inputs = gate.shape
    both = torch.stack((gate.view(-1, PANEL, num_inputs), up.view(-1, PANEL, num_inputs)), dim=1)
    return both.view(2 * size, num_inputs)


def halves_taking_turns(of_heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Give a weight or bias ``[num_heads * head_dim, ...]`` with panels of the halves of each head taking turns.

    So what a rotation mixes lies side by side. ``head_dim`` is a multiple of 32.
    """
    halves = of_heads.view(-1, 2, head_dim // 2 // PANEL, PANEL, *of_heads.shape[1:])
    return halves.transpose(1, 2).reshape(of_heads.shape)


def _in_parts(numbers: torch.Tensor, num_panels: int, size: int) -> torch.Tensor:
    """Give ``[num_panels, num_inputs / size, PANEL, size]``."""
    return numbers.view(num_panels, PANEL, numbers.shape[1] // size, size).transpose(1, 2).contiguous()


def _to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.float()
    scales = _nonzero(weight.abs().amax(1) / 127)
    return (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales.contiguous()


def _to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give ``[num_outputs, num_inputs]`` uint8 from 0 to 15, and two times ``[num_outputs, num_inputs / GROUP]``."""
    groups = weight.float().view(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    steps = _nonzero(((most - least) / 15).half())
    least = least.half()
    numbers = ((groups - least.float()) / steps.float()).round_().clamp_(0, 15).to(torch.uint8)
    return numbers.view(weight.shape), steps.squeeze(2), least.squeeze(2)


def _two_in_a_byte(numbers: torch.Tensor) -> torch.Tensor:
    """Give ``[num_outputs, num_inputs / 2]`` uint8, the first of each two numbers in the lower half."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)
