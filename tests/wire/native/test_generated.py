"""The generated code matches dwork.proto."""

from pathlib import Path

from grpc_tools import protoc

import taskyard.wire


def test_generated_code_matches_the_proto_file(tmp_path: Path) -> None:
    source = Path(taskyard.wire.__file__).parents[2]
    arguments = ["protoc", f"-I{source}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main([*arguments, "taskyard/wire/dwork.proto"]) == 0
    for name in ("dwork_pb2.py", "dwork_pb2.pyi"):
        made = tmp_path / "taskyard" / "wire" / name
        assert made.read_text() == (source / "taskyard" / "wire" / name).read_text()
