"""The server's loop on a loopback Grid: ServerApp, ClientApp, worker and store as they are, no network between them."""

from dataclasses import asdict

from fedkseed.store import Store


def test_a_federation_ends_with_the_digest_of_the_same_recipe_in_one_process(setting, undisturbed, tmp_path):
    directory = setting.begin(tmp_path / "run")
    result = setting.serve(directory)
    assert result.digest == undisturbed.digest
    assert [asdict(result.before), asdict(result.after)] == [asdict(undisturbed.before), asdict(undisturbed.after)]
    assert [r["clients"] for r in result.reports] == [r["clients"] for r in undisturbed.reports]
    assert Store(directory).adapter.exists()
