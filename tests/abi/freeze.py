#!/usr/bin/env python3
"""Freeze the binary interface: copy include/flashattn.h, and write the size of every public struct, the offset of every
field and the value of every constant to layout_<version>.h. Run it when a version is released and keep the older files:
their tests must go on passing. A struct may grow only by turning words of `reserved` into fields, so those are not
listed. Until 0.1 is released, a change of the header is followed by running this again."""
import pathlib, re, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
header = here.parent.parent / "include" / "flashattn.h"
text = header.read_text()

plain = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
structs = {}
for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", plain, flags=re.S):
    fields = []
    for statement in body.split(";"):
        declared = re.sub(r"\[[^\]]*\]", "", statement).strip()
        if declared:
            first, *others = [part.strip() for part in declared.split(",")]
            names = [re.search(r"(\w+)$", part).group(1) for part in [first, *others]]
            fields += [name for name in names if not name.startswith("reserved")]
    structs[name] = fields
values = [name for body in re.findall(r"typedef enum \w+ \{(.*?)\}", plain, flags=re.S)
          for name in re.findall(r"(FLASH_ATTN_\w+)\s*=", body)]

program = '#include "flashattn.h"\n#include <stdio.h>\nint main(void)\n{\n'
for name, fields in structs.items():
    program += f'    printf("SIZE({name}, %zu)\\n", sizeof({name}));\n'
    for field in fields:
        program += f'    printf("FIELD({name}, {field}, %zu, %zu)\\n", offsetof({name}, {field}),\n'
        program += f'           sizeof((({name} *)0)->{field}));\n'
for name in values:
    program += f'    printf("VALUE({name}, %d)\\n", (int){name});\n'
program += "    return 0;\n}\n"

with tempfile.TemporaryDirectory() as folder:
    source, binary = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
    source.write_text(program)
    subprocess.run(["cc", "-std=c11", f"-I{header.parent}", str(source), "-o", str(binary)], check=True)
    lines = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout

version = re.findall(r"#define FLASH_ATTN_VERSION_(?:MAJOR|MINOR) (\d+)", text)
name = "_".join(version)
(here / f"flashattn_{name}.h").write_text(text)
(here / f"layout_{name}.h").write_text(
    f"/* Sizes and offsets of version {'.'.join(version)} on 64-bit machines, written by freeze.py: SIZE(struct, bytes),\n"
    " * FIELD(struct, field, offset, bytes), VALUE(constant, number). */\n" + lines)
