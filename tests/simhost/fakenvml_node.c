/* SPDX-License-Identifier: Apache-2.0 */
/* The fake NVML's entry points about links, fabric, events, measurements and processes. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#include "fakenvml.h"

/* links */

EXPORT nvml_return nvmlDeviceGetTopologyCommonAncestor(void *first, void *second, unsigned *level)
{
    REQUIRE(first);
    REQUIRE(second);
    *level = gpu_behind(first)->topology[gpu_behind(second)->index];
    return SUCCESS;
}

enum { REMOTE_GPU = 0, REMOTE_SWITCH = 2 };

/*
 * Where link number *link* of *gpu* ends: sets *remote*, NULL for an NVSwitch.  The links to GPUs
 * come first, in their order.  INVALID_ARGUMENT for a number that no link has.
 */
static nvml_return remote_of(const struct gpu *gpu, unsigned link, struct gpu **remote)
{
    unsigned first = 0;

    for (int i = 0; i < host.gpu_count; i++) {
        first += gpu->links[i];
        if (link < first) {
            *remote = &host.gpus[i];
            return SUCCESS;
        }
    }
    *remote = NULL;
    if (first + gpu->switch_links == 0)
        return NOT_SUPPORTED;
    return link < first + gpu->switch_links ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvml_return nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *is_active)
{
    struct gpu *remote;

    REQUIRE(handle);
    *is_active = 1;
    return remote_of(gpu_behind(handle), link, &remote);
}

EXPORT nvml_return nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, unsigned *type)
{
    struct gpu *remote;
    nvml_return result;

    REQUIRE(handle);
    result = remote_of(gpu_behind(handle), link, &remote);
    *type = remote ? REMOTE_GPU : REMOTE_SWITCH;
    return result;
}

EXPORT nvml_return nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link,
                                                       struct pci_info *out)
{
    struct gpu *remote;
    nvml_return result;

    REQUIRE(handle);
    result = remote_of(gpu_behind(handle), link, &remote);
    if (result != SUCCESS)
        return result;
    memset(out, 0, sizeof *out);
    if (remote)
        write_pci_info(remote, out);
    else
        snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", 0, 5, 0);
    return SUCCESS;
}

/* nvmlGpuFabricInfo_t */
struct fabric_info {
    unsigned char cluster[16];
    nvml_return status;
    uint32_t clique;
    unsigned state;
};

enum { FABRIC_NOT_SUPPORTED = 0, FABRIC_COMPLETED = 3 };

EXPORT nvml_return nvmlDeviceGetGpuFabricInfo(void *handle, struct fabric_info *out)
{
    const struct gpu *gpu;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    memset(out, 0, sizeof *out);
    memcpy(out->cluster, gpu->cluster, sizeof out->cluster);
    out->clique = gpu->clique;
    out->state = gpu->has_fabric ? FABRIC_COMPLETED : FABRIC_NOT_SUPPORTED;
    if (gpu->fabric_state >= 0) {
        out->state = (unsigned)gpu->fabric_state;
        out->status = gpu->fabric_status;
    }
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetNumaNodeId(void *handle, unsigned *node)
{
    REQUIRE(handle);
    if (gpu_behind(handle)->memory_node < 0)
        return NOT_SUPPORTED;
    *node = (unsigned)gpu_behind(handle)->memory_node;
    return SUCCESS;
}

/* nvmlDeviceAddressingMode_t */
struct addressing_mode {
    unsigned version;
    unsigned value;
};

EXPORT nvml_return nvmlDeviceGetAddressingMode(void *handle, struct addressing_mode *out)
{
    REQUIRE(handle);
    if (!gpu_behind(handle)->addressing)
        return NOT_SUPPORTED;
    out->value = (unsigned)gpu_behind(handle)->addressing;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetComputeMode(void *handle, unsigned *mode)
{
    REQUIRE(handle);
    *mode = gpu_behind(handle)->compute_mode;
    return SUCCESS;
}

/* events */

enum { EVENT_XID = 8 };

/* nvmlEventData_t */
struct event_data {
    void *device;
    unsigned long long type;
    unsigned long long data;
    unsigned gpu_instance;
    unsigned compute_instance;
};

struct event_set {
    unsigned long long types[MAX_GPUS];
    double seen; /* events of this time and before have been returned */
    int changes; /* an inotify descriptor for the directory of the file */
};

/* Watch the directory of the file, which may be replaced. */
static int watch(void)
{
    char directory[4200];
    int changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    char *slash;

    snprintf(directory, sizeof directory, "%s", conf_path());
    slash = strrchr(directory, '/');
    if (slash)
        slash[slash == directory] = '\0';
    inotify_add_watch(changes, slash ? directory : ".",
                      IN_CLOSE_WRITE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE);
    return changes;
}

void sleep_until_change(int *changes)
{
    char buffer[4096];

    if (*changes < 0) {
        *changes = watch();
    } else {
        double left = host.next_change - now();

        poll(&(struct pollfd){.fd = *changes, .events = POLLIN}, 1,
             left > 86400 ? -1 : left <= 0 ? 1 : (int)(left * 1000) + 1);
        while (read(*changes, buffer, sizeof buffer) > 0) {
        }
    }
    refresh();
}

EXPORT nvml_return nvmlEventSetCreate(struct event_set **set)
{
    REQUIRE_INIT();
    *set = calloc(1, sizeof **set);
    (*set)->seen = now();
    (*set)->changes = watch();
    return SUCCESS;
}

EXPORT nvml_return nvmlEventSetFree(struct event_set *set)
{
    REQUIRE_INIT();
    close(set->changes);
    free(set);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *types)
{
    REQUIRE(handle);
    *types = EVENT_XID;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceRegisterEvents(void *handle, unsigned long long types,
                                            struct event_set *set)
{
    REQUIRE(handle);
    if (types & ~(unsigned long long)EVENT_XID)
        return NOT_SUPPORTED;
    set->types[gpu_behind(handle)->index] |= types;
    return SUCCESS;
}

/* Fill *out* with the next event of *set*, if it is due; else set *next* to its time. */
static int take_event(struct event_set *set, struct event_data *out, double *next)
{
    const struct xid *first = NULL;

    for (int i = 0; i < host.xid_count; i++) {
        const struct xid *xid = &host.xids[i];

        if (xid->time <= set->seen || (first && xid->time >= first->time))
            continue;
        if (xid->gpu == -1 || (xid->gpu >= 0 && xid->gpu < MAX_GPUS && set->types[xid->gpu]))
            first = xid;
    }
    if (!first)
        return 0;
    if (first->time > now()) {
        *next = first->time < *next ? first->time : *next;
        return 0;
    }
    set->seen = first->time;
    *out = (struct event_data){
        .device = first->gpu == -1 ? NULL : &host.gpus[first->gpu],
        .type = EVENT_XID,
        .data = first->code,
        .gpu_instance = first->gpu_instance,
        .compute_instance = first->compute_instance,
    };
    return 1;
}

/* SUCCESS with an event in *out*; TIMEOUT without, and *next* is when to look again. */
static nvml_return look(struct event_set *set, struct event_data *out, double *next)
{
    REQUIRE_INIT();
    for (int i = 0; i < host.gpu_count; i++) {
        nvml_return result = host.gpus[i].lost ? GPU_IS_LOST
                                               : failure_of("nvmlEventSetWait_v2", &host.gpus[i]);

        if (set->types[i] && result != SUCCESS)
            return result;
    }
    if (host.next_change < *next)
        *next = host.next_change;
    return take_event(set, out, next) ? SUCCESS : TIMEOUT;
}

EXPORT nvml_return nvmlEventSetWait_v2(struct event_set *set, struct event_data *out,
                                       unsigned timeout_ms)
{
    double end = now() + timeout_ms / 1000.0;
    char changes[4096];

    for (;;) {
        double next = end;
        nvml_return result;

        {
            REQUIRE_INIT();
        }
        result = look(set, out, &next);
        if (result != TIMEOUT || now() >= end)
            return result;
        next -= now();
        poll(&(struct pollfd){.fd = set->changes, .events = POLLIN}, 1,
             next <= 0 ? 1 : (int)(next * 1000) + 1);
        while (read(set->changes, changes, sizeof changes) > 0) {
        }
    }
}

OLDER(nvmlEventSetWait, nvmlEventSetWait_v2, struct event_set *set, struct event_data *out,
      unsigned timeout_ms);

/* measurements */

/* The last line `value` with *name* for the device, *usual* if there is none. */
static double value_of(void *handle, const char *name, double usual)
{
    const struct gpu *gpu = gpu_behind(handle);
    const struct mig *mig = as_mig(handle);

    for (int i = host.value_count - 1; i >= 0; i--) {
        const struct value *value = &host.values[i];

        if (value->gpu == gpu->index && value->mig == (mig ? mig->index : -1) &&
            strcmp(value->name, name) == 0)
            return value->number;
    }
    return usual;
}

/* Measurements that only whole GPUs have. */
#define REQUIRE_GPU(handle)       \
    REQUIRE(handle);              \
    do {                          \
        if (as_mig(handle))       \
            return NOT_SUPPORTED; \
    } while (0)

static unsigned long long memory_of(void *handle)
{
    const struct mig *mig = as_mig(handle);

    return (mig ? mig->attributes.mem_mib : gpu_behind(handle)->mem_mib) << 20;
}

/* nvmlMemory_t, bytes */
struct memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

EXPORT nvml_return nvmlDeviceGetMemoryInfo(void *handle, struct memory *out)
{
    REQUIRE(handle);
    out->total = memory_of(handle);
    out->used = (unsigned long long)value_of(handle, "used_mib", 0) << 20;
    out->free = out->total - out->used;
    return SUCCESS;
}

/* nvmlMemory_v2_t, bytes */
struct memory_v2 {
    unsigned version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
};

EXPORT nvml_return nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out)
{
    REQUIRE(handle);
    out->total = memory_of(handle);
    out->reserved = (unsigned long long)value_of(handle, "reserved_mib", 0) << 20;
    out->used = (unsigned long long)value_of(handle, "used_mib", 0) << 20;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *degrees)
{
    REQUIRE_GPU(handle);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *degrees = (unsigned)value_of(handle, "temperature", 35);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    REQUIRE_GPU(handle);
    *milliwatts = (unsigned)value_of(handle, "power_mw", 100000);
    return SUCCESS;
}

/* 100 W since the machine, or the line `reset` of the GPU, has started. */
EXPORT nvml_return nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    struct timespec time;
    double usual;

    REQUIRE_GPU(handle);
    clock_gettime(CLOCK_BOOTTIME, &time);
    usual = (double)time.tv_sec + (double)time.tv_nsec / 1e9 - gpu_behind(handle)->reset_time;
    *millijoules = (unsigned long long)value_of(handle, "energy_mj", usual * 100000);
    return SUCCESS;
}

enum { CLOCK_KIND_SM = 1, CLOCK_KIND_MEMORY = 2 };

EXPORT nvml_return nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *mhz)
{
    REQUIRE_GPU(handle);
    if (kind == CLOCK_KIND_SM)
        *mhz = (unsigned)value_of(handle, "sm_clock", 1980);
    else if (kind == CLOCK_KIND_MEMORY)
        *mhz = (unsigned)value_of(handle, "memory_clock", 2619);
    else
        return INVALID_ARGUMENT;
    return SUCCESS;
}

/* nvmlUtilization_t, percent */
struct utilization {
    unsigned gpu;
    unsigned memory;
};

EXPORT nvml_return nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out)
{
    REQUIRE_GPU(handle);
    out->gpu = (unsigned)value_of(handle, "gpu_util", 0);
    out->memory = (unsigned)value_of(handle, "memory_util", 0);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetEncoderUtilization(void *handle, unsigned *percent,
                                                   unsigned *period_us)
{
    REQUIRE_GPU(handle);
    *percent = (unsigned)value_of(handle, "encoder_util", 0);
    *period_us = 167000;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetDecoderUtilization(void *handle, unsigned *percent,
                                                   unsigned *period_us)
{
    REQUIRE_GPU(handle);
    *percent = (unsigned)value_of(handle, "decoder_util", 0);
    *period_us = 167000;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetPcieReplayCounter(void *handle, unsigned *count)
{
    REQUIRE_GPU(handle);
    *count = (unsigned)value_of(handle, "pcie_replay", 0);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetTotalEccErrors(void *handle, unsigned error, unsigned counter,
                                               unsigned long long *count)
{
    REQUIRE_GPU(handle);
    if (error > 1 || counter > 1)
        return INVALID_ARGUMENT;
    *count = (unsigned long long)value_of(
        handle,
        error ? (counter ? "ecc_uncorrected_aggregate" : "ecc_uncorrected_volatile")
              : (counter ? "ecc_corrected_aggregate" : "ecc_corrected_volatile"),
        0);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected,
                                             unsigned *uncorrected, unsigned *is_pending,
                                             unsigned *has_failed)
{
    REQUIRE_GPU(handle);
    *corrected = (unsigned)value_of(handle, "remapped_corrected", 0);
    *uncorrected = (unsigned)value_of(handle, "remapped_uncorrected", 0);
    *is_pending = (unsigned)value_of(handle, "remap_pending", 0);
    *has_failed = (unsigned)value_of(handle, "remap_failed", 0);
    return SUCCESS;
}

/* nvmlFieldValue_t */
struct field_value {
    uint32_t id;
    uint32_t scope;
    int64_t timestamp;
    int64_t latency_us;
    unsigned type;
    nvml_return result;
    union {
        unsigned number;
        unsigned long long wide;
    } value;
};

enum { FIELD_MEMORY_TEMPERATURE = 82, TYPE_UNSIGNED = 1 };

EXPORT nvml_return nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values)
{
    REQUIRE_GPU(handle);
    for (int i = 0; i < count; i++) {
        values[i].result = NOT_SUPPORTED;
        if (values[i].id == FIELD_MEMORY_TEMPERATURE) {
            values[i].type = TYPE_UNSIGNED;
            values[i].result = SUCCESS;
            values[i].value.number = (unsigned)value_of(handle, "memory_temperature", 40);
        }
    }
    return SUCCESS;
}

/* processes */

/* nvmlProcessInfo_t */
struct process_info {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance;
    unsigned compute_instance;
};

static int uses(const struct process *process, void *handle)
{
    const struct mig *mig = as_mig(handle);

    if (process->gpu != gpu_behind(handle)->index)
        return 0;
    return !mig || ((int)process->gpu_instance == mig->gpu_instance &&
                    (int)process->compute_instance == mig->compute_instance);
}

EXPORT nvml_return nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count,
                                                           struct process_info *out)
{
    unsigned size;
    unsigned used = 0;

    REQUIRE(handle);
    size = *count;
    for (int i = 0; i < host.process_count; i++) {
        const struct process *process = &host.processes[i];

        if (!uses(process, handle))
            continue;
        if (out && used < size)
            out[used] = (struct process_info){
                .pid = process->pid,
                .bytes = process->mem_mib << 20,
                .gpu_instance = process->gpu_instance,
                .compute_instance = process->compute_instance,
            };
        used++;
    }
    *count = used;
    return used > size ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count,
                                                              struct process_info *out)
{
    (void)out;
    REQUIRE(handle);
    *count = 0;
    return SUCCESS;
}
