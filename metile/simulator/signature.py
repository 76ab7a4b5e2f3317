"""The text that `mx.fast.metal_kernel` makes of a kernel's body: MLX's signature, name and instantiation.

What decides the text is which arrays come in (dtype, no axes, fewer than 8 elements), the dtypes that go out, the
template arguments, and which words stand in the body. The text that is compiled differs from the one MLX shows only by
line markers, which let an error or a finding name the line of the user's own string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from metile.errors import mismatch

TYPE_NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}
CONSTANT_BELOW = 8  # elements: smaller inputs are in the constant address space
MAX_BUFFERS = 31  # buffer indices that Metal has
UTILITIES = '#include "mlx/backend/metal/kernels/utils.h"\n'
ATTRIBUTES: dict[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TemplateValue = bool | int | mx.Dtype
Template = tuple[tuple[str, TemplateValue], ...]
Role = Literal["data", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True)
class Passed:
    """How an input array is passed: nothing else about it changes the text."""

    dtype: mx.Dtype
    scalar: bool
    constant: bool

    @classmethod
    def of(cls, array: mx.array) -> Passed:
        """Describe one input."""
        return cls(array.dtype, array.ndim == 0, array.size < CONSTANT_BELOW)


@dataclass(frozen=True)
class Slot:
    """One buffer index of the kernel: which input or output it belongs to, and what of it."""

    name: str
    position: int
    role: Role
    constant: bool = False


@dataclass(frozen=True)
class Generated:
    """A kernel's text.

    Attributes:
        name: the function's name, which tells instances of one kernel apart.
        shown: the text as MLX makes it and ``verbose`` prints it.
        text: what is compiled: MLX's utilities, and the text with line markers.
        instance: the function, with template arguments if it is a template.
        slots: what each buffer index holds.
    """

    name: str
    shown: str
    text: str
    instance: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Body:
    """What a kernel is defined by, before any array is known."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""
    atomic_outputs: bool = False

    def generate(self, passed: Sequence[Passed], outputs: Sequence[mx.Dtype], template: Template) -> Generated:
        """Make the text for one kind of arguments.

        Raises:
            MetileError: more buffers than Metal has, or a dtype that Metal lacks.
        """
        name = _instance_name(self.name, passed, outputs, template)
        slots = self._slots(passed)
        if len(slots) > MAX_BUFFERS:
            raise mismatch(self.name, f"at most {MAX_BUFFERS} buffers, shapes and strides included,", len(slots))
        instance = name + _arguments(template)
        head = _template_line(template) + f"[[kernel]] void {name}(\n"
        head += ",\n".join((*self._buffers(slots, passed, outputs), *self._attributes())) + ") {\n"
        tail = "\n}\n"
        if template:
            tail += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
        text = UTILITIES + self._marked("header", self.header) + self._marked("signature", head)
        text += self._marked("source", self.source) + self._marked("signature", tail, head.count("\n"))
        return Generated(name, self.header + head + self.source + tail, text, instance, slots)

    def _marked(self, part: str, text: str, line: int = 1) -> str:
        file = f"{self.name}.{part}".replace("\\", "\\\\").replace('"', '\\"')
        return f'#line {line} "{file}"\n{text}' + ("" if text.endswith("\n") else "\n") if text else ""

    def _slots(self, passed: Sequence[Passed]) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        roles: tuple[Role, ...] = ("shape", "strides", "ndim")
        for position, (name, kind) in enumerate(zip(self.inputs, passed, strict=True)):
            slots.append(Slot(name, position, "data", kind.constant))
            if not kind.scalar:
                words = [(role, f"{name}_{role}") for role in roles]
                slots += [Slot(word, position, role, True) for role, word in words if word in self.source]
        slots += [Slot(name, position, "output") for position, name in enumerate(self.outputs)]
        return tuple(slots)

    def _buffers(self, slots: Sequence[Slot], passed: Sequence[Passed], outputs: Sequence[mx.Dtype]) -> list[str]:
        fixed = {"shape": "const constant int*", "strides": "const constant int64_t*", "ndim": "const constant int&"}
        lines = []
        for index, slot in enumerate(slots):
            if slot.role == "data":
                kind = passed[slot.position]
                space, declarator = "constant" if kind.constant else "device", "&" if kind.scalar else "*"
                declared = f"const {space} {type_name(kind.dtype)}{declarator}"
            elif slot.role == "output":
                name = type_name(outputs[slot.position])
                declared = f"device {f'atomic<{name}>' if self.atomic_outputs else name}*"
            else:
                declared = fixed[slot.role]
            lines.append(f"  {declared} {slot.name} [[buffer({index})]]")
        return lines

    def _attributes(self) -> list[str]:
        return [f"  {kind} {name} [[{name}]]" for name, kind in ATTRIBUTES.items() if name in self.source]


def type_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name in kernel text.

    Raises:
        MetileError: Metal has no such type.
    """
    name = TYPE_NAMES.get(dtype)
    if name is None:
        raise mismatch("metal_kernel", f"a dtype that Metal has ({', '.join(map(str, TYPE_NAMES))})", dtype)
    return name


def _value(value: TemplateValue) -> str:
    return type_name(value) if isinstance(value, mx.Dtype) else str(int(value))


def _arguments(template: Template) -> str:
    return f"<{', '.join(_value(value) for _, value in template)}>" if template else ""


def _template_line(template: Template) -> str:
    if not template:
        return ""
    kinds = ("typename" if isinstance(v, mx.Dtype) else "bool" if isinstance(v, bool) else "int" for _, v in template)
    return f"template <{', '.join(f'{kind} {name}' for kind, (name, _) in zip(kinds, template, strict=True))}>\n"


def _instance_name(name: str, passed: Sequence[Passed], outputs: Sequence[mx.Dtype], template: Template) -> str:
    """Name what decides the text, as MLX does."""
    parts = [f"custom_kernel_{name}"]
    if template:
        parts += ["", *(_value(value).replace("-", "_") for _, value in template)]
    for kind in passed:
        parts.append(type_name(kind.dtype) + ("s" if kind.scalar else "c" if kind.constant else ""))
    return "_".join([*parts, *map(type_name, outputs)])
