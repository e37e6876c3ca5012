"""Outrider inside vLLM's own server: `OUTRIDER=1 vllm serve MODEL`, or any server that is built on vLLM's.

- `entry_point`: what vLLM calls in every process.
- `takeover`: changes the flags of the engine; undoes it and lets vLLM serve alone if the engine does not start so.
- `start_record`: remembers a start that failed.
- `service_of_flags`: the service that vLLM's flags and the file OUTRIDER_CONFIG describe.
- `stock_app`: pages, metrics and the SLO header in vLLM's app.
- `activity`: says whether Outrider is active, in the log and in a metric.
"""
