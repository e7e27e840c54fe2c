import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tests.training.run_files import rows


def test_tensorboards_hparams_tab_has_the_config_and_the_final_metrics(finished):
    spec = finished("logger=tensorboard", "balancing=lbl", "seed=3")
    events = EventAccumulator(str(spec.path / "tensorboard")).Reload()
    plugin = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    shown = {key: value.ListFields()[0][1] for key, value in _session(plugin).hparams.items()}
    assert shown["balancing.lbl.coef"] == 0.01
    assert shown["seed"] == 3
    assert shown["model.num_experts"] == 4
    assert not [key for key in shown if "dir" in key or "path" in key]
    experiment = metadata.parse_experiment_plugin_data(
        events.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    )
    metrics = {info.name.tag for info in experiment.metric_infos}
    assert {"final/val/loss", "final/val/ppl", "final/val/unique_experts"} <= metrics
    final = next(row for row in reversed(rows(spec)) if "val/loss" in row)
    assert events.Scalars("final/val/ppl")[-1].value == pytest.approx(final["val/ppl"])


def _session(content: bytes):
    return metadata.parse_session_start_info_plugin_data(content)
