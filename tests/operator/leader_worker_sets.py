"""The controller of LeaderWorkerSets, as a process of this machine, and its webhooks for one namespace."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from outrider_operator.kinds import LEADER_WORKER_SET

from setup import binaries
from tests.cluster.cluster import Cluster
from tests.operator.webhook import certificate_for
from tests.ports import free_port

_WEBHOOKS = ("mleaderworkerset.kb.io", "mpod.kb.io", "vleaderworkerset.kb.io")


class LeaderWorkerSets:
    """Installs the CRD, and runs the controller while the block runs."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._cluster, self._namespace, self._folder = cluster, namespace, folder
        self._program, self._configuration = binaries.leader_worker_set(), binaries.leader_worker_set_configuration()
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._folder / "lws.log"

    def __enter__(self) -> LeaderWorkerSets:
        """The webhooks come first: pods that are made before lack the labels that the controller needs."""
        with ExitStack() as stack:
            stack.push(self.__exit__)  # webhooks that lead to no process would refuse the cluster's next pods
            self._make_certificate()
            self._register()
            self._install()
            self._start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        kinds = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
        for kind in kinds:
            self._cluster.try_kubectl("delete", kind, "lws-test")
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._cluster.kubectl("delete", "-f", str(self._crd), "--wait=false", "--ignore-not-found")

    @property
    def _crd(self) -> Path:
        return self._configuration / "crd" / "bases" / "leaderworkerset.x-k8s.io_leaderworkersets.yaml"

    def _install(self) -> None:
        self._cluster.kubectl("apply", "--server-side", "-f", str(self._crd))
        other = self._crd.with_name("disaggregatedset.x-k8s.io_disaggregatedsets.yaml")
        self._cluster.kubectl("apply", "--server-side", "-f", str(other))  # its controller is in the same process
        self._cluster.wait_established(f"crd/{LEADER_WORKER_SET.plural}.{LEADER_WORKER_SET.group}")

    def _make_certificate(self) -> None:
        certificate = certificate_for(self._cluster.machine_address, self._folder)
        shutil.copy(certificate, self._folder / "tls.crt")
        shutil.copy(certificate.with_name("key"), self._folder / "tls.key")

    def _start(self) -> None:
        settings = self._folder / "lws.yaml"
        settings.write_text(yaml.safe_dump(self._settings()))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._program), f"--config={settings}", "--leader-elect=false"],
                env={**os.environ, "KUBECONFIG": str(self._cluster.kubeconfig)},
                stdout=log,
                stderr=log,
            )

    def _settings(self) -> dict[str, Any]:
        return {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
            "internalCertManagement": {"enable": False},
            "webhook": {
                "host": self._cluster.machine_address, "port": self._port, "certDir": str(self._folder),
            },
        }  # fmt: skip

    def _register(self) -> None:
        """The shipped webhooks, for the namespace of the test alone."""
        manifests = self._configuration / "webhook" / "manifests.yaml"
        authority = base64.b64encode((self._folder / "tls.crt").read_bytes()).decode()
        for document in yaml.safe_load_all(manifests.read_text()):
            kept = [webhook for webhook in document["webhooks"] if webhook["name"] in _WEBHOOKS]
            for webhook in kept:
                path = webhook["clientConfig"]["service"]["path"]
                url = f"https://{self._cluster.machine_address}:{self._port}{path}"
                webhook["clientConfig"] = {"url": url, "caBundle": authority}
                webhook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}}
            document |= {"metadata": {"name": "lws-test"}, "webhooks": kept}
            self._cluster.apply(document)
