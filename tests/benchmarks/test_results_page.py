"""docs/results.md is what its script writes, and shows the newest run of each benchmark and kind of machine only."""

import json
from pathlib import Path

from benchmarks.results_page import DOCS, newest, page, plot


def test_the_page_and_its_plot_are_what_the_script_writes() -> None:
    hint = "run: python -m benchmarks.results_page"
    assert (DOCS / "results.md").read_text() == page(), hint
    assert (DOCS / "results.svg").read_text() == plot(), hint


def test_the_readme_shows_figures_of_the_page() -> None:
    """All of a benchmark's claims that a row of the README shows, in its day's row."""
    shown = {"engine_mid": 3, "interference_mid": 2, "ttft_mid": 1, "balance_mid": 1, "kv_turns": 1}
    lines = (DOCS.parent / "README.md").read_text().splitlines()
    for benchmark, number in shown.items():
        rows = [row for row in newest() if row.benchmark == benchmark][:number]
        figures = ", ".join(f"{row.claim.ratio:.2f}" + " (missed)" * (not row.claim.met) for row in rows)
        assert any(f"| {figures} |" in line and line.endswith(f"| {rows[0].day} |") for line in lines), benchmark


def save(folder: Path, name: str, hardware: dict[str, str], **ratios: float) -> None:
    def claim(ratio: float) -> dict[str, object]:
        return {"name": "a claim", "ratio": ratio, "limit": 1.0, "better": "lower", "met": ratio <= 1, "figures": {}}

    benchmarks = {key: {"claims": [claim(ratio)]} for key, ratio in ratios.items()}
    day = name.removeprefix("gpu-")[:10]
    (folder / f"{name}.json").write_text(json.dumps({"date": day, "hardware": hardware, "benchmarks": benchmarks}))


def test_the_newest_run_of_each_kind_of_machine_counts(tmp_path: Path) -> None:
    save(tmp_path, "2026-11-22", {"isa": "avx2"}, startup=0.1, front=0.2, structured=0.3)
    save(tmp_path, "2026-11-23", {"isa": "amx_bf16"}, startup=0.4)
    save(tmp_path, "2026-11-24-avx2", {"isa": "avx2"}, startup=1.5)
    save(tmp_path, "gpu-2026-11-21", {"isa": "avx2", "gpu": "NVIDIA X"}, engine=0.6)
    save(tmp_path, "2026-11-25", {"cpu": "unknown"}, startup=0.7)
    rows = [(row.benchmark, row.machine, row.day, row.claim.ratio) for row in newest(tmp_path)]
    assert rows == [
        ("front", "avx2", "2026-11-22", 0.2),
        ("startup", "amx_bf16", "2026-11-23", 0.4),
        ("startup", "avx2", "2026-11-24", 1.5),
        ("engine", "NVIDIA X", "2026-11-21", 0.6),
    ]
    text = page(tmp_path)
    assert text.count("## startup") == 1
    assert (
        "| a claim | 1.50 | ≤ 1.00 | **missed** | avx2 | [2026-11-24](../benchmarks/results/2026-11-24-avx2.md) |"
        in text
    )
    assert '`make gpu PARTS="engine"`' in text


def test_a_note_is_shown_beside_its_run_only(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n\n## startup 2026-11-22\n\nold\n\n## startup 2026-11-23\n\nnew\n")
    for day in "2026-11-22", "2026-11-23":
        save(tmp_path, day, {"isa": "avx2"}, startup=1.5)
    assert "\n\nnew\n\n" in page(tmp_path)
    assert "old" not in page(tmp_path)


def test_the_newest_report_of_each_kind_is_listed(tmp_path: Path) -> None:
    for name in "soak-2026-11-22", "soak-2026-11-27", "faults-ahead-2026-11-23", "shapes-2026-11-23":
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "2026-11-23.md").write_text("# Benchmarks of 2026-11-23\n")
    assert page(tmp_path).splitlines()[-2:] == [
        "- [faults-ahead-2026-11-23](../benchmarks/results/faults-ahead-2026-11-23.md)",
        "- [soak-2026-11-27](../benchmarks/results/soak-2026-11-27.md)",
    ]
