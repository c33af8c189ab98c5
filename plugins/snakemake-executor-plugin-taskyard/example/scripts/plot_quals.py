# ruff: noqa: INP001  # a script of a workflow
"""Draw the quality of each variant as a bar. Snakemake runs it, and defines `snakemake`."""

from pathlib import Path

SCALE = 0.25

variants = Path(snakemake.input[0]).read_text().splitlines()  # noqa: F821
qualities = [float(line.split("\t")[5]) for line in variants if not line.startswith("#")]
bars = "".join(
    f'<rect x="{10 * number}" width="8" height="{quality * SCALE:.1f}"/>'
    for number, quality in enumerate(qualities)
)
svg = f'<svg xmlns="http://www.w3.org/2000/svg">{bars}</svg>\n'
Path(snakemake.output[0]).write_text(svg)  # noqa: F821
