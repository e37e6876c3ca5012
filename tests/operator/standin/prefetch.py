"""`outrider-prefetch`, as a stand-in: reports a quarter of twelve GiB until STANDIN_PREFETCH says that it may end."""

from __future__ import annotations

import os
import signal
import sys
import time
from http import HTTPStatus
from pathlib import Path

from outrider_crds.prefetch_report import PREFETCH_REFUSED, PrefetchProgress
from outrider_crds.runtime_config import ADMIN_PORT, MODEL_CACHE_DIR
from outrider_runtime.server.listeners import listen
from outrider_runtime.server.page_server import PageServer, WebPage

_GIB = 1 << 30


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    body = PrefetchProgress(downloaded_bytes=3 * _GIB, total_bytes=12 * _GIB).model_dump_json(by_alias=True).encode()
    PageServer(listen("", ADMIN_PORT, ""), lambda _: WebPage(HTTPStatus.OK, "application/json", body)).start()
    cache = Path(MODEL_CACHE_DIR)
    with (cache / "downloads").open("a") as file:
        file.write(f"{' '.join(sys.argv[1:])}\n")
    behaviour = os.environ.get("STANDIN_PREFETCH", "ok")
    if behaviour == "refuse":
        print("outrider-prefetch: model 'tests/gated' cannot be had from the hub: 401", file=sys.stderr)
        sys.exit(PREFETCH_REFUSED)
    while behaviour == "wait" and not (cache / "go").exists():
        time.sleep(0.2)


if __name__ == "__main__":
    main()
