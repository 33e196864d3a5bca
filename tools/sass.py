"""What the machine code of a kernel shows that neither its source nor a few runs do."""

import re
import subprocess
import tempfile

import triton


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def overwritten_operands(listing: str) -> list[str]:
    """Instructions that write a register which a product of a warp group may still be reading.

    Such a product (HGMMA) runs beside the program until a wait (WARPGROUP.DEPBAR). Where it takes an operand from
    registers and the wait comes in the next turn of a loop, the compiler may use them for something else before that.
    Any wait counts here, also one that leaves later products under way.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(code[1])
    found = []
    for begin, product in enumerate(instructions):
        if operand := re.match(r"HGMMA\S+ R\d+, R(\d+), gdesc", product):
            read = set(range(int(operand[1]), int(operand[1]) + 4))
            found += [
                f"{product} / {other}"
                for other in _under_way(instructions, labels, begin + 1)
                if _written(other) & read
            ]
    return found


def _under_way(instructions: list[str], labels: dict[str, int], begin: int) -> list[str]:
    """All that can run from `begin` on before a wait for products."""
    seen: set[int] = set()
    todo = [begin]
    while todo:
        at = todo.pop()
        if at in seen or at >= len(instructions) or "WARPGROUP.DEPBAR" in instructions[at]:
            continue
        seen.add(at)
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instructions[at])
        if jump:
            todo.append(labels[jump[1]])
        if not (instructions[at].startswith("EXIT") or (jump and not instructions[at].startswith("@"))):
            todo.append(at + 1)
    return [instructions[at] for at in seen]


def _written(instruction: str) -> set[int]:
    """Registers that an instruction other than a product writes, which follow its only destination."""
    code = re.match(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(?:\w?P\w*, )?R(\d+)\b", instruction)
    if code is None or code[1].startswith(("HGMMA", "ST", "RED", "BAR")):
        return set()
    width = 4 if ".128" in code[1] else 2 if ".64" in code[1] or ".WIDE" in code[1] else 1
    return set(range(int(code[2]), int(code[2]) + width))
