"""How the jobs of a sweep ended, in the terms of Hydra's launchers."""

from collections.abc import Iterable

from hydra.core.utils import JobReturn, JobStatus

from simbal.sweep.attempt import Attempt


def job_returns(attempts: Iterable[Attempt]) -> list[JobReturn]:
    """One for each; its value is None, as all that counts stands in the run's folder, or an error."""
    returns = []
    for attempt in attempts:
        failed = attempt.state == "failed"
        job_return = JobReturn(overrides=[*attempt.job], working_dir=str(attempt.job.spec.path))
        job_return.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
        job_return.return_value = RuntimeError(attempt.error) if failed else None
        returns.append(job_return)
    return returns
