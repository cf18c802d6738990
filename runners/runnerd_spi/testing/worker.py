"""The process in which a runner is checked: ``python -m runnerd_spi.testing.worker``, started by ``isolated``.

It reads what to check as lines of JSON from standard input and answers in lines of JSON on a descriptor of its own, so
that a runner may print what it likes. It ends at the end of its standard input.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import TextIO

from runnerd_spi.discovery import load_runner, parse_options
from runnerd_spi.errors import ModelLoadError, RunnerError, RunnerUnavailable
from runnerd_spi.runner import RunnerPlugin
from runnerd_spi.testing.checks_lifecycle import frameworks_imported
from runnerd_spi.testing.kit import Kit
from runnerd_spi.testing.rules import BY_ID
from runnerd_spi.testing.running import Result, run_rule
from runnerd_spi.testing.subject import Broken, Subject, loaded_frameworks


def find_plugin(target: str) -> RunnerPlugin:
    """Give a runner by the name it is installed under, or by ``module:attribute``.

    Raises:
        RunnerError: There is none, or it cannot be used.
    """
    if ":" not in target:
        return load_runner(target)
    module, _, attribute = target.partition(":")
    try:
        plugin = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise RunnerUnavailable(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(plugin, RunnerPlugin):
        raise RunnerUnavailable(f"{target} is a {type(plugin).__name__}, expected a runnerd_spi.RunnerPlugin")
    return plugin


def main() -> int:
    """Serve until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        job = json.loads(sys.stdin.readline())
        before = loaded_frameworks()
        try:
            plugin = find_plugin(job["target"])
            plugin.check()
            options = parse_options(plugin, job["options"])
            subject = Subject(plugin, options, job["model"], job["dtype"])
            brought = _brought(before)
            # Once, so that what cannot be checked at all is told apart from what is broken.
            subject.create().close()
            kit = Kit(subject, job["seed"], job["num_traces"], job["seconds"])
            with kit.session():
                pass
        except (RunnerError, ImportError) as error:
            _answer(answers, {"unusable": f"{type(error).__name__}: {error}"})
            return 2
        except Exception as error:  # noqa: BLE001 - a runner may raise anything
            rule = "L3" if isinstance(error, ModelLoadError) else "L1"
            _answer(answers, {"unusable": f"it does not come up ({rule}): {type(error).__name__}: {error}"})
            return 2
        _answer(answers, {"ready": plugin.name})
        try:
            _serve(kit, job["limit"], answers, brought)
        finally:
            kit.close()
    return 0


def _serve(kit: Kit, limit: float, answers: TextIO, brought: Result | None) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        # Where it hangs is told before whoever waits for the answer gives up.
        faulthandler.dump_traceback_later(limit, exit=False)
        result = run_rule(kit, BY_ID[order["rule"]], order["broken"])
        faulthandler.cancel_dump_traceback_later()
        if result.rule_id == "P1" and result.status == "holds" and brought is not None:
            result = brought
        _answer(answers, asdict(result))


def _brought(before: frozenset[str]) -> Result | None:
    try:
        frameworks_imported(before)
    except Broken as error:
        return Result("P1", "broken", str(error))
    return None


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
