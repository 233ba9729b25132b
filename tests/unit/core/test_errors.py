"""The error table is one table."""

from offloadd.core.errors import Code, known_code
from offloadd.wire.pb import errors_pb2


def test_python_and_proto_tables_have_the_same_names_and_numbers() -> None:
    proto = {name.removeprefix("CODE_"): number for name, number in errors_pb2.Code.items()}
    proto["OK"] = proto.pop("UNSPECIFIED")
    assert proto == {code.name: int(code) for code in Code}


def test_a_number_from_a_newer_version_reads_as_internal() -> None:
    assert known_code(299) is Code.INTERNAL
