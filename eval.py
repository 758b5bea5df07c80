"""Evaluate trained models, or any timm model, under translation and at other sizes; on the test split only.

python eval.py checkpoint=RUN                          one run folder, or a .safetensors file
python eval.py runs=FOLDER                             every run below it, side by side in one table and report
python eval.py results=FOLDER                          the same again from stored decisions, without models
python eval.py model=TIMM_NAME [pretrained=true | weights=FILE] data=folder data.root=...   a model not trained here

torchrun --nproc-per-node 2 eval.py ...                on several processes or devices, with the same results

One that was stopped goes on when the same command (with the same out=) is given again.
What can be set: configs/eval.yaml; each probe's own options: vitpos/probes/. What is written: docs/results.md.
"""

import functools
import shlex
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from vitpos import cli, evaluation, parts, probes, report, sources, stored

COMMAND = shlex.join(["python", Path(__file__).name, *sys.argv[1:]])


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
@cli.task
def main(cfg: DictConfig) -> None:
    # what is asked for: refused here, before anything is loaded or written
    evaluation.check(cfg)
    processes = parts.Processes()
    device = evaluation.device(cfg, processes)
    options = evaluation.options(cfg)
    evaluation.check_read(cfg, HydraConfig.get().overrides.task)
    models, out = evaluation.select(cfg, device, processes)
    provenance = evaluation.provenance(COMMAND, cfg, device)
    about = {"schema": report.SCHEMA, "provenance": provenance}

    # each model: per-image decisions, then numbers from those alone
    runs, decided, kept = [], [], []
    if cfg.results is not None:
        runs, decided, origin = stored.read(sources.roots_of("results", cfg.results))
        provenance.update(origin)
    with evaluation.progress(processes) as track:
        for load, folder in models:
            source = load()
            subject = probes.Subject(
                source.model, source.images, mean=source.mean, std=source.std,
                device=device, batch_size=cfg.batch_size, limit=cfg.images, places=source.places,
                restrict=cfg.restrict, precision=cfg.precision, track=functools.partial(track, source.about["label"]),
            )  # fmt: skip
            subject.parts = evaluation.keep(folder, subject, options, source.about["data"], processes)
            with evaluation.going_on(subject.parts):
                decisions = probes.evaluate(subject, options)
            run = {**source.about, "image_size": list(subject.size), **probes.summarize(decisions)}
            if len(models) > 1 and processes.first:
                report.save({**about, "runs": [run]}, folder, page=False, predictions=parts.pack(decisions))
            runs.append(run)
            decided.append(decisions)
            kept.append(subject.parts)
    processes.close()
    if not processes.first:
        return

    # all of them side by side, and encodings over their seeds
    evaluation.add_differences(runs, decided, report.baselines(runs))
    results = evaluation.add_comparison({**about, "encodings": evaluation.summaries(runs), "runs": runs}, decided, cfg)
    report.save(results, out, predictions=parts.pack(decided[0]) if len(models) == 1 else None)
    evaluation.show(results, out, cfg.tensorboard)
    for one in kept:
        one.discard()
    report.print_table(results, Console(width=None if sys.stdout.isatty() else 100))
    for line in results.get("not_compared", []):
        print(f"not compared over seeds: {line}")
    print(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    sys.argv[1:] = evaluation.words(sys.argv[1:], cli.quote)
    cli.run(main)
