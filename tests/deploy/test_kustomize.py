"""Rendered objects can be changed with Kustomize."""

import shutil
import subprocess
from pathlib import Path

import yaml

from tests.deploy.objects import named
from tests.deploy.renderer import Renderer, parse

KUBECTL = shutil.which("kubectl")
LIMIT_S = 30.0


if KUBECTL is not None:  # without kubectl there is no Kustomize to test with

    def test_rendered_objects_go_through_kustomize(helm: Renderer, tmp_path: Path) -> None:
        (tmp_path / "all.yaml").write_text(helm.text({"runtime": {"mode": "kuberay"}}))
        patch = [{"op": "replace", "path": "/spec/replicas", "value": 5}]
        kustomization = {
            "resources": ["all.yaml"],
            "labels": [{"pairs": {"team": "serving"}}],
            "patches": [
                {"target": {"kind": "Deployment", "name": "rel-baton-gateway"}, "patch": yaml.safe_dump(patch)}
            ],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        done = subprocess.run(
            [str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S
        )

        assert done.returncode == 0, done.stderr
        gateway = named(parse(done.stdout), "Deployment", "rel-baton-gateway")
        assert gateway["spec"]["replicas"] == 5
        assert gateway["metadata"]["labels"]["team"] == "serving"
