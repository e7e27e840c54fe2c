"""Make Hydra find conf/ and sweeps/ of the current folder, after the configs of simbal."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.search_path_plugin import SearchPathPlugin

from simbal.config.options import CONF, SWEEPS, local_conf, local_sweeps

SCHEME = "simbal-sweeps"


class SweepsSource(FileConfigSource):
    """A folder in which Hydra sees only sweeps/. Otherwise any folder, such as seed/, would become a config group."""

    @staticmethod
    def scheme() -> str:
        """Return the part before :// in Hydra's search path."""
        return SCHEME

    def is_group(self, config_path: str) -> bool:
        """Return whether a path is the group `sweeps`."""
        return config_path == SWEEPS and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is a named sweep."""
        return config_path.startswith(f"{SWEEPS}/") and super().is_config(config_path)

    def available(self) -> bool:
        """Return whether the folder exists."""
        return super().is_group(SWEEPS)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group."""
        if config_path == "":
            return [SWEEPS] if results_filter in (None, ObjectType.GROUP) else []
        return super().list(config_path, results_filter)


class ProjectSearchPath(SearchPathPlugin):
    """The search path of simbal's programs. Other Hydra programs are not affected."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append conf/ and sweeps/ of the current folder."""
        if not any(place.provider == "main" and place.path == str(CONF) for place in search_path.get_path()):
            return
        for conf in local_conf():
            search_path.append("project", str(conf.absolute()))
        for sweeps in local_sweeps():
            search_path.append("project", f"{SCHEME}://{sweeps.absolute().parent}")
