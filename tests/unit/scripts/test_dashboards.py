"""The dashboards in the repository."""

import json

import pytest
import yaml

from scripts import dashboards


def test_those_in_the_repository_are_what_the_code_writes() -> None:
    assert dashboards.main(["--check"]) == 0


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_every_query_is_in_its_panel(name: str) -> None:
    document = json.loads(dashboards.build(name))
    written = {
        (panel["title"], target["expr"])
        for panel in document["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    }
    assert written == set(dashboards.queries(dashboards.DASHBOARDS[name][1]()))
    assert len({panel["title"] for panel in document["panels"]}) == len(document["panels"])


def test_every_alert_says_what_is_wrong() -> None:
    rules = yaml.safe_load((dashboards.FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} >= {"SluiceAttainmentBurn", "SluiceShedding", "SluicePoolDown"}
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)
