# SPDX-License-Identifier: Apache-2.0
"""Observe the driver: the only place of this package that leads to NVML.

`watcher.Watcher` starts one child process, which asks NVML, and keeps what the child reports:

    watcher = Watcher(driver_root="/", dev_root="/")
    async with watcher:                            # starts the child, and ends it
        async for update in watcher.updates():     # a model.Update: the current one first
            update.status, update.model, update.events
        watcher.current                            # the last Update, without events
        watcher.request_telemetry()                # a model.Telemetry, or None before the first

Each iteration of `updates()` is a stream of its own: the first item is the current state without
events, and a consumer that is slow gets the newest state with all events since its last item.
Nothing here waits for the driver: a driver without an answer is DriverState.HANGING, with the time
since when. `Update.model` is kept while the driver is absent or hangs; `NodeModel.gpus` has the
GPUs that a container can use, without those in `NodeModel.left_out`.

The child: `child` is its program, `survey` what it asks, `telemetry` what it measures, `wire` the
frames on the pipe. The parent: `supervision` decides over virtual time when the child is started,
asked and killed, `changes` derives events from two models, `child_handle` is the process.
"""
