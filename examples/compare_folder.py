"""Compare the candidates of a folder: python examples/compare_folder.py samples level1_36 report

Writes report/leaderboard.md, best first, and report/rows.csv with every column. Needs pandas. On a machine with a GPU
the order is upstream's time; without one there is no time, and the page says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kbsub.eval import judge


def main(folder: str, task: str, report: str) -> int:
    files = sorted(Path(folder).glob("*.py"))
    verdict = judge(files, task, only=("official",), out=Path(report) / "result.json")
    frame = verdict.frame().sort_values(["correct", "ms", "status"], ascending=[False, True, True], na_position="last")
    Path(report).mkdir(parents=True, exist_ok=True)
    frame.to_csv(Path(report) / "rows.csv")
    gpu = verdict.result.environment.gpu
    where = f"on {gpu}, by KernelBench's evaluator" if gpu else "on a CPU: a local check, nothing official, no times"
    page = [f"# {len(frame)} candidates for {task}", "", f"Judged {where}.", ""]
    page += ["| candidate | status | ms | speedup | why |", "|---|---|---:|---:|---|"]
    for name, row in frame.iterrows():
        numbers = [
            f"{row[key]:.3g}" if row[key] == row[key] and row[key] is not None else "-" for key in ("ms", "speedup")
        ]
        why = " ".join(str(row["reason"] or "").split()).replace("|", "\\|")
        page.append(f"| {name} | {row['status']} | {' | '.join(numbers)} | {why} |")
    (Path(report) / "leaderboard.md").write_text("\n".join(page) + "\n", "utf-8")
    print(
        f"wrote {report}/leaderboard.md and {report}/rows.csv; {(frame['status'] == 'OK').sum()} of {len(frame)} are OK"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
