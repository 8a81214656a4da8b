"""What a JUnit file must be like for the systems that read it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import xmlschema


@cache
def _schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(Path(__file__).with_name("junit.xsd"))


def assert_valid_junit(text: str) -> ElementTree.Element:
    """Of the schema beside this file, and with counts that are those of its cases; the root."""
    _schema().validate(text)
    root = ElementTree.fromstring(text)
    for number, suite in enumerate(root):
        assert suite.attrib["id"] == str(number)
        assert suite.attrib["tests"] == str(len(suite.findall("testcase")))
        for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert suite.attrib[count] == str(len(suite.findall(f"testcase/{kind}")))
    return root
