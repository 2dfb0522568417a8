"""`kbsub fetch`: get and verify the pinned KernelBench checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.adapters.pin import UPSTREAM_URL


def command(
    source: Annotated[
        str, typer.Option("--from", metavar="PATH_OR_URL", help="A git URL, or a bare or plain repository on disk.")
    ] = UPSTREAM_URL,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to put it; the user cache folder if not given.")
    ] = None,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Say why it failed and exit 0: runs go on without it.")
    ] = False,
) -> None:
    """Get the pinned KernelBench commit (depth 1, no prompts) and verify it. A second fetch changes nothing.

    \b
    kbsub fetch
    kbsub fetch --from ../KernelBench --to KernelBench
    """
    from kbsub.adapters.checkout import CheckoutError, fetch, find_checkout

    try:
        if best_effort and to is None:
            try:  # any verified checkout will do, also the one KERNELBENCH_DIR names
                found = find_checkout()
                typer.echo(f"KernelBench {found.commit}: {found.path} (verified)")
                return
            except CheckoutError:
                pass
        done = fetch(source, to, say=typer.echo)
    except CheckoutError as error:
        typer.echo(f"kbsub fetch: {error}", err=True)
        if best_effort:
            typer.echo("going on without KernelBench: nothing official can be certified in this run", err=True)
            return
        raise typer.Exit(1) from None
    if done.replaced:
        typer.echo(f"replaced: {done.replaced}")
    done_word = "fetched and verified" if done.new else "already there, verified; nothing to do"
    typer.echo(f"KernelBench {done.checkout.commit}: {done.checkout.path} ({done_word})")
