/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated host's libnvidia-ml.so.1: the NVML entry points that device discovery needs,
 * answered from a text file.  Written from the public NVML API documentation.
 *
 * The file is the one that $FAKENVML_CONF names, else fakenvml.conf beside this library (links
 * followed).  It is read at each first nvmlInit.  No file means no driver.  One entry a line:
 *
 *   driver 550.163.01
 *   nvml 12.550.163.01
 *   cuda 12040
 *   initdelay_us 0                      sleep in nvmlInit, as a cold driver does
 *   gpu UUID MINOR BUSID MEM_MIB MIG(0|1) NAME WITH SPACES
 *   arch GPU MAJOR MINOR                its compute capability, 9.0 by default
 *   brand GPU NUMBER                    nvmlBrandType_t, 14 (NVIDIA) by default
 *   mig GPU INDEX UUID GI CI GI_SLICES CI_SLICES MEM_MIB
 *   fault init-fails [CODE]             nvmlInit returns CODE (9: driver not loaded)
 *   fault init-hangs                    nvmlInit never returns
 *   fault lost GPU                      every query about that GPU returns 15 (GPU is lost)
 *   fault mig-lost GPU INDEX            every query about that MIG device returns 15
 *   fault nobusid GPU                   that GPU has an empty bus id
 *   fault fails FUNCTION CODE [GPU]     FUNCTION (as exported) returns CODE, for one GPU or for all
 *
 * In UUIDs and names \xNN stands for a byte.  A function can be made to be missing altogether: see
 * symbols.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvml_return;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    UNKNOWN = 999,
};

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_MIGS 7
#define NAME_BYTES 512
#define MAX_FAILURES 16

/* First member of what a handle points to: tells the two kinds of handle apart. */
enum kind { NONE, GPU, MIG };

struct gpu;

struct mig {
    enum kind kind;
    int index;
    int gpu_instance;
    int compute_instance;
    int gpu_slices;
    int compute_slices;
    int lost;
    unsigned long long mem_mib;
    char uuid[NAME_BYTES];
    struct gpu *parent;
};

struct gpu {
    enum kind kind;
    int index;
    int minor;
    int mig_mode;
    int lost;
    int nobusid;
    int arch_major;
    int arch_minor;
    unsigned brand;
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned long long mem_mib;
    char uuid[NAME_BYTES];
    char name[NAME_BYTES];
    struct mig migs[MAX_MIGS];
};

/* A function that fails: for the GPU of that index, or for all where it is -1. */
struct failure {
    char function[64];
    int code;
    int gpu;
};

static struct {
    struct gpu gpus[MAX_GPUS];
    struct failure failures[MAX_FAILURES];
    int failure_count;
    int gpu_count;
    int cuda;
    int init_fails;
    int init_hangs;
    unsigned delay_us;
    char driver[80];
    char nvml[80];
} host;

static int references;

/* Replace each \xNN in *text* by that byte, which must not be 0. */
static void unescape(char *text)
{
    char *to = text;
    unsigned byte;

    for (const char *from = text; *from; from++) {
        if (from[0] == '\\' && sscanf(from, "\\x%2x", &byte) == 1 && byte != 0) {
            *to++ = (char)byte;
            from += 3;
        } else {
            *to++ = *from;
        }
    }
    *to = '\0';
}

static void parse_gpu(const char *line)
{
    struct gpu gpu = {.kind = GPU, .index = host.gpu_count, .arch_major = 9, .brand = 14};
    char bus_id[32];
    int name_at = 0;

    if (host.gpu_count == MAX_GPUS)
        return;
    if (sscanf(line, "gpu %511s %d %31s %llu %d %n", gpu.uuid, &gpu.minor, bus_id, &gpu.mem_mib,
               &gpu.mig_mode, &name_at) != 5)
        return;
    if (sscanf(bus_id, "%x:%x:%x", &gpu.domain, &gpu.bus, &gpu.device) != 3)
        return;
    snprintf(gpu.name, sizeof gpu.name, "%s", line + name_at);
    unescape(gpu.uuid);
    unescape(gpu.name);
    host.gpus[host.gpu_count++] = gpu;
}

static void parse_mig(const char *line)
{
    struct mig mig = {.kind = MIG};
    int gpu;

    if (sscanf(line, "mig %d %d %511s %d %d %d %d %llu", &gpu, &mig.index, mig.uuid,
               &mig.gpu_instance, &mig.compute_instance, &mig.gpu_slices, &mig.compute_slices,
               &mig.mem_mib) != 8)
        return;
    if (gpu < 0 || gpu >= host.gpu_count || mig.index < 0 || mig.index >= MAX_MIGS)
        return;
    unescape(mig.uuid);
    mig.parent = &host.gpus[gpu];
    host.gpus[gpu].migs[mig.index] = mig;
}

static int is_gpu(int number)
{
    return number >= 0 && number < MAX_GPUS;
}

static void parse_arch(const char *line)
{
    int gpu;
    int major;
    int minor;

    if (sscanf(line, "arch %d %d %d", &gpu, &major, &minor) != 3 || !is_gpu(gpu))
        return;
    host.gpus[gpu].arch_major = major;
    host.gpus[gpu].arch_minor = minor;
}

static void parse_brand(const char *line)
{
    int gpu;
    unsigned brand;

    if (sscanf(line, "brand %d %u", &gpu, &brand) == 2 && is_gpu(gpu))
        host.gpus[gpu].brand = brand;
}

static void parse_failure(const char *fault)
{
    struct failure failure = {.gpu = -1};

    if (host.failure_count < MAX_FAILURES &&
        sscanf(fault, "fails %63s %d %d", failure.function, &failure.code, &failure.gpu) >= 2)
        host.failures[host.failure_count++] = failure;
}

static void parse_fault(const char *fault)
{
    int number;
    int mig;

    if (strncmp(fault, "init-fails", 10) == 0) {
        host.init_fails = DRIVER_NOT_LOADED;
        sscanf(fault, "init-fails %d", &host.init_fails);
    } else if (strcmp(fault, "init-hangs") == 0) {
        host.init_hangs = 1;
    } else if (strncmp(fault, "fails ", 6) == 0) {
        parse_failure(fault);
    } else if (sscanf(fault, "lost %d", &number) == 1 && is_gpu(number)) {
        host.gpus[number].lost = 1;
    } else if (sscanf(fault, "nobusid %d", &number) == 1 && is_gpu(number)) {
        host.gpus[number].nobusid = 1;
    } else if (sscanf(fault, "mig-lost %d %d", &number, &mig) == 2 && is_gpu(number) &&
               mig >= 0 && mig < MAX_MIGS) {
        host.gpus[number].migs[mig].lost = 1;
    }
}

static FILE *open_conf(void)
{
    const char *named = getenv("FAKENVML_CONF");
    char path[4096];
    char library[4096];
    Dl_info info;
    char *slash;

    if (named && *named)
        return fopen(named, "re");
    if (!dladdr((void *)open_conf, &info) || !info.dli_fname)
        return NULL;
    if (!realpath(info.dli_fname, library))
        return NULL;
    slash = strrchr(library, '/');
    *slash = '\0';
    snprintf(path, sizeof path, "%.4000s/fakenvml.conf", library);
    return fopen(path, "re");
}

/* Read the file into `host`; 0 if there is none. */
static int load(void)
{
    FILE *file = open_conf();
    char line[2048];

    memset(&host, 0, sizeof host);
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (strncmp(line, "gpu ", 4) == 0)
            parse_gpu(line);
        else if (strncmp(line, "mig ", 4) == 0)
            parse_mig(line);
        else if (strncmp(line, "arch ", 5) == 0)
            parse_arch(line);
        else if (strncmp(line, "brand ", 6) == 0)
            parse_brand(line);
        else if (strncmp(line, "driver ", 7) == 0)
            sscanf(line, "driver %79s", host.driver);
        else if (strncmp(line, "nvml ", 5) == 0)
            sscanf(line, "nvml %79s", host.nvml);
        else if (strncmp(line, "cuda ", 5) == 0)
            sscanf(line, "cuda %d", &host.cuda);
        else if (strncmp(line, "initdelay_us ", 13) == 0)
            sscanf(line, "initdelay_us %u", &host.delay_us);
    }
    /* Faults name GPUs by index: they come last, wherever they stand in the file. */
    rewind(file);
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (strncmp(line, "fault ", 6) == 0)
            parse_fault(line + 6);
    }
    fclose(file);
    return 1;
}

static nvml_return put(char *to, unsigned size, const char *text)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* The GPU that *handle* stands for, itself or as parent of a MIG device; NULL for neither. */
static struct gpu *gpu_behind(void *handle)
{
    if (!handle)
        return NULL;
    if (*(enum kind *)handle == GPU)
        return handle;
    if (*(enum kind *)handle == MIG)
        return ((struct mig *)handle)->parent;
    return NULL;
}

static struct mig *as_mig(void *handle)
{
    if (handle && *(enum kind *)handle == MIG)
        return handle;
    return NULL;
}

/* The code with which *function* fails for *gpu* (NULL: for none). */
static nvml_return failure_of(const char *function, const struct gpu *gpu)
{
    for (int i = 0; i < host.failure_count; i++) {
        const struct failure *failure = &host.failures[i];

        if (strcmp(failure->function, function) == 0 &&
            (failure->gpu == -1 || (gpu && failure->gpu == gpu->index)))
            return failure->code;
    }
    return SUCCESS;
}

/* What *function*, which asks about a device, checks first. */
static nvml_return usable(const char *function, void *handle)
{
    struct gpu *gpu;
    struct mig *mig;

    if (references == 0)
        return UNINITIALIZED;
    gpu = gpu_behind(handle);
    if (!gpu)
        return INVALID_ARGUMENT;
    mig = as_mig(handle);
    if (gpu->lost || (mig && mig->lost))
        return GPU_IS_LOST;
    return failure_of(function, gpu);
}

#define REQUIRE(handle)                            \
    do {                                           \
        nvml_return usable_ = usable(__func__, handle); \
        if (usable_ != SUCCESS)                    \
            return usable_;                        \
    } while (0)

#define REQUIRE_INIT()                             \
    do {                                           \
        if (references == 0)                       \
            return UNINITIALIZED;                  \
        if (failure_of(__func__, NULL))            \
            return failure_of(__func__, NULL);     \
    } while (0)

/*
 * An older version of a function, the same here.  An alias and no call: where the newer one is
 * made to be missing, the older must still be there.
 */
#define OLDER(name, newer, ...) EXPORT nvml_return name(__VA_ARGS__) __attribute__((alias(#newer)))

/* start and stop */

static nvml_return start(void)
{
    if (references > 0) {
        references++;
        return SUCCESS;
    }
    if (!load())
        return DRIVER_NOT_LOADED;
    while (host.init_hangs)
        pause();
    if (host.delay_us > 0)
        usleep(host.delay_us);
    if (host.init_fails)
        return host.init_fails;
    references = 1;
    return SUCCESS;
}

EXPORT nvml_return nvmlInit_v2(void)
{
    return start();
}

OLDER(nvmlInit, nvmlInit_v2, void);

EXPORT nvml_return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return start();
}

EXPORT nvml_return nvmlShutdown(void)
{
    REQUIRE_INIT();
    references--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvml_return code)
{
    switch (code) {
    case SUCCESS:
        return "Success";
    case UNINITIALIZED:
        return "Uninitialized";
    case INVALID_ARGUMENT:
        return "Invalid Argument";
    case NOT_SUPPORTED:
        return "Not Supported";
    case NO_PERMISSION:
        return "Insufficient Permissions";
    case NOT_FOUND:
        return "Not Found";
    case INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case TIMEOUT:
        return "Timeout";
    case FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case GPU_IS_LOST:
        return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    default:
        return "Unknown Error";
    }
}

/* the system */

EXPORT nvml_return nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    REQUIRE_INIT();
    return put(text, size, host.driver);
}

EXPORT nvml_return nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
    REQUIRE_INIT();
    return put(text, size, host.nvml);
}

EXPORT nvml_return nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    REQUIRE_INIT();
    *version = host.cuda;
    return SUCCESS;
}

OLDER(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2, int *version);

/* handles */

EXPORT nvml_return nvmlDeviceGetCount_v2(unsigned *count)
{
    REQUIRE_INIT();
    *count = host.gpu_count;
    return SUCCESS;
}

OLDER(nvmlDeviceGetCount, nvmlDeviceGetCount_v2, unsigned *count);

EXPORT nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    REQUIRE_INIT();
    if (index >= (unsigned)host.gpu_count)
        return INVALID_ARGUMENT;
    REQUIRE(&host.gpus[index]);
    *handle = &host.gpus[index];
    return SUCCESS;
}

OLDER(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2, unsigned index, void **handle);

static void *find_uuid(const char *uuid)
{
    for (int i = 0; i < host.gpu_count; i++) {
        struct gpu *gpu = &host.gpus[i];

        if (strcmp(gpu->uuid, uuid) == 0)
            return gpu;
        for (int j = 0; j < MAX_MIGS; j++) {
            if (gpu->migs[j].kind == MIG && strcmp(gpu->migs[j].uuid, uuid) == 0)
                return &gpu->migs[j];
        }
    }
    return NULL;
}

EXPORT nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    void *found;

    REQUIRE_INIT();
    found = find_uuid(uuid);
    if (!found)
        return NOT_FOUND;
    REQUIRE(found);
    *handle = found;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle)
{
    unsigned domain;
    unsigned bus;
    unsigned device;

    REQUIRE_INIT();
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) != 3)
        return INVALID_ARGUMENT;
    for (int i = 0; i < host.gpu_count; i++) {
        struct gpu *gpu = &host.gpus[i];

        if (gpu->domain == domain && gpu->bus == bus && gpu->device == device) {
            REQUIRE(gpu);
            *handle = gpu;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

/* one device */

EXPORT nvml_return nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    return put(text, size, mig ? mig->uuid : gpu_behind(handle)->uuid);
}

EXPORT nvml_return nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    REQUIRE(handle);
    return put(text, size, gpu_behind(handle)->name);
}

EXPORT nvml_return nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    *index = mig ? mig->index : gpu_behind(handle)->index;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMinorNumber(void *handle, unsigned *minor)
{
    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    *minor = gpu_behind(handle)->minor;
    return SUCCESS;
}

/* nvmlPciInfo_t */
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pci_device_id;
    unsigned pci_subsystem_id;
    char bus_id[32];
};

static void write_legacy_bus_id(const struct gpu *gpu, struct pci_info *out)
{
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0",
             gpu->domain & 0xffff, gpu->bus & 0xff, gpu->device & 0x1f);
}

EXPORT nvml_return nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *out)
{
    struct gpu *gpu;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    memset(out, 0, sizeof *out);
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->device;
    out->pci_device_id = 0x233010de;
    out->pci_subsystem_id = 0x16c110de;
    if (gpu->nobusid)
        return SUCCESS;
    write_legacy_bus_id(gpu, out);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus & 0xff,
             gpu->device & 0x1f);
    return SUCCESS;
}

/* Older versions end before the long bus id. */
EXPORT nvml_return nvmlDeviceGetPciInfo_v2(void *handle, struct pci_info *out)
{
    struct gpu *gpu;

    REQUIRE(handle);
    gpu = gpu_behind(handle);
    memset(out, 0, offsetof(struct pci_info, bus_id));
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->device;
    if (!gpu->nobusid)
        write_legacy_bus_id(gpu, out);
    return SUCCESS;
}

OLDER(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2, void *handle, struct pci_info *out);

/* nvmlMemory_t, bytes */
struct memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

EXPORT nvml_return nvmlDeviceGetMemoryInfo(void *handle, struct memory *out)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    out->total = (mig ? mig->mem_mib : gpu_behind(handle)->mem_mib) << 20;
    out->free = out->total;
    out->used = 0;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetBrand(void *handle, unsigned *brand)
{
    REQUIRE(handle);
    *brand = gpu_behind(handle)->brand;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetArchitecture(void *handle, unsigned *architecture)
{
    REQUIRE(handle);
    *architecture = gpu_behind(handle)->arch_major; /* 9: NVML_DEVICE_ARCH_HOPPER */
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    REQUIRE(handle);
    *major = gpu_behind(handle)->arch_major;
    *minor = gpu_behind(handle)->arch_minor;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetVirtualizationMode(void *handle, unsigned *mode)
{
    REQUIRE(handle);
    *mode = 0; /* none */
    return SUCCESS;
}

/* MIG */

EXPORT nvml_return nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    REQUIRE(handle);
    if (as_mig(handle))
        return INVALID_ARGUMENT;
    *current = gpu_behind(handle)->mig_mode;
    *pending = *current;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    REQUIRE(handle);
    *count = MAX_MIGS;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out)
{
    struct mig *mig;

    REQUIRE(handle);
    if (as_mig(handle) || index >= MAX_MIGS)
        return INVALID_ARGUMENT;
    mig = &gpu_behind(handle)->migs[index];
    if (mig->kind != MIG)
        return NOT_FOUND;
    *out = mig;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_mig)
{
    REQUIRE(handle);
    *is_mig = as_mig(handle) != NULL;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *out = gpu_behind(handle);
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *id = as_mig(handle)->gpu_instance;
    return SUCCESS;
}

EXPORT nvml_return nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id)
{
    REQUIRE(handle);
    if (!as_mig(handle))
        return INVALID_ARGUMENT;
    *id = as_mig(handle)->compute_instance;
    return SUCCESS;
}

/* nvmlDeviceAttributes_t */
struct attributes {
    unsigned multiprocessors;
    unsigned copy_engines;
    unsigned decoders;
    unsigned encoders;
    unsigned jpegs;
    unsigned ofas;
    unsigned gpu_slices;
    unsigned compute_slices;
    unsigned long long mem_mib;
};

EXPORT nvml_return nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out)
{
    struct mig *mig = as_mig(handle);

    REQUIRE(handle);
    if (!mig)
        return INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->multiprocessors = 16 * mig->compute_slices;
    out->copy_engines = 1;
    out->decoders = 1;
    out->gpu_slices = mig->gpu_slices;
    out->compute_slices = mig->compute_slices;
    out->mem_mib = mig->mem_mib;
    return SUCCESS;
}

OLDER(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2, void *handle, struct attributes *out);
