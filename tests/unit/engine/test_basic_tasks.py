from meshpoint.model.outcomes import Ok

from .agents import doubler, summer
from .mesh import Mesh


async def test_a_task_pauses_and_resumes(mesh: Mesh) -> None:
    await mesh.replica(doubler, summer)
    out = await mesh.ask("summer", [1, 2, 3])
    for e in mesh.events.all:
        print(e.step, e.phase, e.agent, e.task_ids, dict(e.detail))
    assert isinstance(out, Ok)
    assert out.value == 12


async def test_a_task_pauses_and_resumes_without_a_database(mesh: Mesh) -> None:
    await mesh.replica(doubler, summer, durable=False)
    out = await mesh.ask("summer", [1, 2, 3])
    assert isinstance(out, Ok)
    assert out.value == 12
