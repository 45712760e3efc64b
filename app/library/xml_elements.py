"""Reads elements of XML whatever their namespaces, which differ between versions of the office formats."""

from xml.etree.ElementTree import Element


def local_name(element: Element) -> str:
    """An element's name without its namespace."""
    return str(element.tag).rsplit("}", 1)[-1]


def xml_child(node: Element | None, *names: str) -> Element | None:
    """An element's first child of one of these names."""
    return next((each for each in node if local_name(each) in names), None) if node is not None else None


def xml_attribute(node: Element | None, name: str) -> str:
    """An attribute's value; "" if there is none."""
    attributes = node.attrib.items() if node is not None else ()
    return next((found for key, found in attributes if key.rpartition("}")[2] == name), "")


def child_val(node: Element | None, name: str) -> str:
    """The attribute `val` of an element's child, as Office Open XML stores most values; "" if there is none."""
    return xml_attribute(xml_child(node, name), "val")
