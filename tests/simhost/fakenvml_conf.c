/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fakenvml.conf, the text file that the fake NVML answers from: docs/development/simulated-host.md
 * has its lines.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "fakenvml.h"

#define MAX_LINES 4096
#define FAR_FUTURE 1e18
/* nvmlGpuTopologyLevel_t: the GPUs of different CPU sockets. */
#define TOPOLOGY_SYSTEM 50

struct host host;

static struct stat read_file;
static int is_read;

static double seconds(clockid_t clock)
{
    struct timespec time;

    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

double now(void)
{
    return seconds(CLOCK_REALTIME);
}

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

static int is_gpu(int number)
{
    return number >= 0 && number < MAX_GPUS;
}

static int is_mig(int gpu, int mig)
{
    return is_gpu(gpu) && mig >= 0 && mig < MAX_MIGS;
}

static void parse_gpu(const char *line)
{
    struct gpu gpu = {
        .kind = GPU,
        .index = host.gpu_count,
        .arch_major = 9,
        .fabric_state = -1,
        .memory_node = -1,
        .brand = 14,
        .mig_pending = -1,
        .device_id = 0x233010de,
        .subsystem_id = 0x16c110de,
    };
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
    memset(gpu.topology, TOPOLOGY_SYSTEM, sizeof gpu.topology);
    host.gpus[host.gpu_count++] = gpu;
}

/* The id of the usual profile with that many slices, and the number of its memory slices. */
static unsigned usual_profile(unsigned slices, unsigned *size)
{
    *size = slices <= 2 ? slices : slices <= 4 ? 4 : 8;
    return slices == 1 ? 19 : slices == 2 ? 14 : slices == 3 ? 9 : slices == 4 ? 5 : 0;
}

static void parse_mig(const char *line)
{
    struct mig mig = {.kind = MIG};
    struct attributes *attributes = &mig.attributes;
    int gpu;

    if (sscanf(line, "mig %d %d %511s %d %d %u %u %llu", &gpu, &mig.index, mig.uuid,
               &mig.gpu_instance, &mig.compute_instance, &attributes->gpu_slices,
               &attributes->compute_slices, &attributes->mem_mib) != 8)
        return;
    if (gpu < 0 || gpu >= host.gpu_count || mig.index < 0 || mig.index >= MAX_MIGS)
        return;
    unescape(mig.uuid);
    attributes->multiprocessors = 16 * attributes->compute_slices;
    attributes->copy_engines = 1;
    attributes->decoders = 1;
    mig.profile = usual_profile(attributes->gpu_slices, &mig.size);
    mig.start = mig.index * mig.size;
    mig.parent = &host.gpus[gpu];
    host.gpus[gpu].migs[mig.index] = mig;
}

static void parse_instance(const char *line)
{
    unsigned start;
    unsigned size;
    unsigned profile;
    int gpu;
    int mig;

    if (sscanf(line, "miginstance %d %d %u %u %u", &gpu, &mig, &start, &size, &profile) != 5 ||
        !is_mig(gpu, mig))
        return;
    host.gpus[gpu].migs[mig].start = start;
    host.gpus[gpu].migs[mig].size = size;
    host.gpus[gpu].migs[mig].profile = profile;
}

static void parse_engines(const char *line)
{
    struct attributes read;
    struct attributes *to;
    int gpu;
    int mig;

    if (sscanf(line, "migengines %d %d %u %u %u %u %u %u", &gpu, &mig, &read.multiprocessors,
               &read.copy_engines, &read.decoders, &read.encoders, &read.jpegs, &read.ofas) != 8 ||
        !is_mig(gpu, mig))
        return;
    to = &host.gpus[gpu].migs[mig].attributes;
    read.gpu_slices = to->gpu_slices;
    read.compute_slices = to->compute_slices;
    read.mem_mib = to->mem_mib;
    *to = read;
}

static void parse_cluster(struct gpu *gpu, const char *uuid)
{
    unsigned byte;
    int count = 0;

    while (*uuid && count < 16) {
        if (*uuid == '-') {
            uuid++;
        } else if (sscanf(uuid, "%2x", &byte) == 1 && uuid[1]) {
            gpu->cluster[count++] = (unsigned char)byte;
            uuid += 2;
        } else {
            return;
        }
    }
    gpu->has_fabric = 1;
}

/* A line of one GPU that is not a device, or of two GPUs. */
static void parse_fact(const char *line)
{
    struct gpu *gpu;
    char text[64];
    unsigned first;
    unsigned second;
    int read;
    int index;

    if (sscanf(line, "%*s %d", &index) != 1 || !is_gpu(index))
        return;
    gpu = &host.gpus[index];
    if (sscanf(line, "fabric %*d %63s %u", text, &first) == 2) {
        gpu->clique = first;
        parse_cluster(gpu, text);
        return;
    }
    if (sscanf(line, "fabricstate %*d %u %u", &first, &second) == 2) {
        gpu->fabric_state = (int)first;
        gpu->fabric_status = (int)second;
        return;
    }
    if (sscanf(line, "pci %*d %x %x", &first, &second) == 2) {
        gpu->device_id = first;
        gpu->subsystem_id = second;
        return;
    }
    read = sscanf(line, "%63s %*d %u %u", text, &first, &second);
    if (read == 3 && strcmp(text, "arch") == 0) {
        gpu->arch_major = (int)first;
        gpu->arch_minor = (int)second;
    } else if (read == 3 && first < MAX_GPUS && strcmp(text, "nvlink") == 0) {
        gpu->links[first] = (unsigned char)second;
    } else if (read == 3 && first < MAX_GPUS && strcmp(text, "topology") == 0) {
        gpu->topology[first] = (unsigned char)second;
        host.gpus[first].topology[index] = (unsigned char)second;
    } else if (read >= 2 && strcmp(text, "addressing") == 0) {
        gpu->addressing = (int)first;
        gpu->memory_node = read == 3 ? (int)second : -1;
    } else if (read == 2 && strcmp(text, "brand") == 0) {
        gpu->brand = first;
    } else if (read == 2 && strcmp(text, "nvswitch") == 0) {
        gpu->switch_links = first;
    } else if (read == 2 && strcmp(text, "computemode") == 0) {
        gpu->compute_mode = first;
    } else if (read == 2 && strcmp(text, "migpending") == 0) {
        gpu->mig_pending = (int)first;
    } else if (read == 2 && strcmp(text, "migmode") == 0) {
        gpu->mig_mode = (int)first;
    } else if (read == 1 && strcmp(text, "migreset") == 0) {
        gpu->mig_reset = 1;
    }
}

static void parse_value(const char *line)
{
    struct value value = {.mig = -1};

    if (host.value_count == MAX_VALUES)
        return;
    if (sscanf(line, "value %d:%d %31s %lf", &value.gpu, &value.mig, value.name,
               &value.number) == 4 ||
        sscanf(line, "value %d %31s %lf", &value.gpu, value.name, &value.number) == 3)
        host.values[host.value_count++] = value;
}

static void parse_process(const char *line)
{
    struct process process = {.gpu_instance = NO_INSTANCE, .compute_instance = NO_INSTANCE};

    if (host.process_count < MAX_PROCESSES &&
        sscanf(line, "process %d %u %llu %u %u", &process.gpu, &process.pid, &process.mem_mib,
               &process.gpu_instance, &process.compute_instance) >= 3)
        host.processes[host.process_count++] = process;
}

static void parse_xid(const char *line, double time)
{
    struct xid xid = {
        .time = time,
        .gpu = -1,
        .gpu_instance = NO_INSTANCE,
        .compute_instance = NO_INSTANCE,
    };

    if (host.xid_count == MAX_XIDS)
        return;
    if (sscanf(line, "xid %d %u %u %u", &xid.gpu, &xid.code, &xid.gpu_instance,
               &xid.compute_instance) >= 2 ||
        sscanf(line, "xid - %u", &xid.code) == 1) {
        /* Of two at the same time, the first line is the first event. */
        xid.time += host.xid_count * 1e-6;
        host.xids[host.xid_count++] = xid;
    }
}

static void parse_failure(const char *fault)
{
    struct failure failure = {.gpu = -1};

    if (host.failure_count == MAX_FAILURES)
        return;
    if (sscanf(fault, "fails %63s %d %d", failure.function, &failure.code, &failure.gpu) >= 2) {
        host.failures[host.failure_count++] = failure;
    } else if (sscanf(fault, "hangs %63s %d", failure.function, &failure.gpu) >= 1) {
        failure.hangs = 1;
        host.failures[host.failure_count++] = failure;
    }
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
    } else if (strncmp(fault, "fails ", 6) == 0 || strncmp(fault, "hangs ", 6) == 0) {
        parse_failure(fault);
    } else if (sscanf(fault, "lost %d", &number) == 1 && is_gpu(number)) {
        host.gpus[number].lost = 1;
    } else if (sscanf(fault, "nobusid %d", &number) == 1 && is_gpu(number)) {
        host.gpus[number].nobusid = 1;
    } else if (sscanf(fault, "mig-lost %d %d", &number, &mig) == 2 && is_mig(number, mig)) {
        host.gpus[number].migs[mig].lost = 1;
    }
}

/* A line about the driver as a whole. */
static void parse_driver(const char *line)
{
    if (strncmp(line, "driver ", 7) == 0)
        sscanf(line, "driver %79s", host.driver);
    else if (strncmp(line, "nvml ", 5) == 0)
        sscanf(line, "nvml %79s", host.nvml);
    else if (strncmp(line, "cuda ", 5) == 0)
        sscanf(line, "cuda %d", &host.cuda);
    else if (strncmp(line, "initdelay_us ", 13) == 0)
        sscanf(line, "initdelay_us %u", &host.delay_us);
    else if (strcmp(line, "unloaded") == 0)
        host.absent = 1;
}

static int starts_with(const char *line, const char *word)
{
    size_t length = strlen(word);

    return strncmp(line, word, length) == 0 && (line[length] == ' ' || line[length] == '\0');
}

/* Parse a line of devices; the others name them by index and come later. */
static void parse_devices(const char *line)
{
    if (starts_with(line, "gpu"))
        parse_gpu(line);
    else if (starts_with(line, "mig"))
        parse_mig(line);
}

static void parse_others(const char *line)
{
    if (starts_with(line, "fault"))
        parse_fault(line + 5 + (line[5] == ' '));
    else if (starts_with(line, "value"))
        parse_value(line);
    else if (starts_with(line, "process"))
        parse_process(line);
    else if (starts_with(line, "miginstance"))
        parse_instance(line);
    else if (starts_with(line, "migengines"))
        parse_engines(line);
    else {
        parse_fact(line);
        parse_driver(line);
    }
}

/*
 * What follows `at A` or `at A-B` on *line* if that holds now, NULL otherwise.  Times count from
 * *base*.  An XID is read in any case.
 */
static const char *in_effect(const char *line, double base)
{
    double from = 0;
    double until = FAR_FUTURE;
    double time = now();
    int rest = 0;
    int gpu;

    if (sscanf(line, "at %lf-%lf %n", &from, &until, &rest) != 2 || rest == 0) {
        until = FAR_FUTURE;
        if (sscanf(line, "at %lf %n", &from, &rest) != 1 || rest == 0)
            return NULL;
    }
    from += base;
    until = until == FAR_FUTURE ? until : until + base;
    line += rest;
    if (starts_with(line, "xid")) {
        parse_xid(line, from);
        return NULL;
    }
    if (from > time && from < host.next_change)
        host.next_change = from;
    if (until > time && until < host.next_change)
        host.next_change = until;
    if (from > time || until <= time)
        return NULL;
    if (sscanf(line, "reset %d", &gpu) == 1 && is_gpu(gpu))
        host.gpus[gpu].reset_time = seconds(CLOCK_BOOTTIME) - (time - from);
    return line;
}

/* Set *path*, of *size* bytes, to the file that its first line names: `elsewhere PATH`. */
static void follow(char *path, size_t size)
{
    char line[4200];
    FILE *file = fopen(path, "re");

    if (file && fgets(line, sizeof line, file) && starts_with(line, "elsewhere")) {
        line[strcspn(line, "\n")] = '\0';
        snprintf(path, size, "%s", line + strlen("elsewhere "));
    }
    if (file)
        fclose(file);
}

const char *conf_path(void)
{
    static char path[4200];
    const char *named = getenv("FAKENVML_CONF");
    char library[4096];
    Dl_info info;
    char *slash;

    if (named && *named)
        return named;
    if (!dladdr((void *)conf_path, &info) || !info.dli_fname)
        return "";
    if (!realpath(info.dli_fname, library))
        return "";
    slash = strrchr(library, '/');
    *slash = '\0';
    snprintf(path, sizeof path, "%s/fakenvml.conf", library);
    follow(path, sizeof path);
    return path;
}

/* The text of *file*, to be freed; NULL if it cannot be read. */
static char *text_of(FILE *file)
{
    size_t size = (size_t)read_file.st_size;
    char *text = malloc(size + 1);

    if (text)
        text[fread(text, 1, size, file)] = '\0';
    return text;
}

/* Read the file into `host`. */
static void load(void)
{
    const char *lines[MAX_LINES];
    FILE *file = fopen(conf_path(), "re");
    char *text = NULL;
    char *rest;
    double base;
    int count = 0;

    memset(&host, 0, sizeof host);
    host.next_change = FAR_FUTURE;
    is_read = file && fstat(fileno(file), &read_file) == 0;
    if (is_read)
        text = text_of(file);
    if (file)
        fclose(file);
    if (!text) {
        host.absent = 1;
        return;
    }
    base = (double)read_file.st_mtim.tv_sec + (double)read_file.st_mtim.tv_nsec / 1e9;
    for (char *line = strtok_r(text, "\r\n", &rest); line && count < MAX_LINES;
         line = strtok_r(NULL, "\r\n", &rest)) {
        lines[count++] = line;
        if (!starts_with(line, "at"))
            parse_devices(line);
    }
    /* Then the time table, which names GPUs by index, and the lines that name devices. */
    for (int i = 0; i < count; i++) {
        if (starts_with(lines[i], "at")) {
            lines[i] = in_effect(lines[i], base);
            if (lines[i])
                parse_devices(lines[i]);
        }
    }
    for (int i = 0; i < count; i++) {
        if (lines[i])
            parse_others(lines[i]);
    }
    free(text);
}

void refresh(void)
{
    struct stat file;
    int exists = stat(conf_path(), &file) == 0;

    if (exists != is_read || now() >= host.next_change ||
        (exists && (file.st_ino != read_file.st_ino || file.st_size != read_file.st_size ||
                    memcmp(&file.st_mtim, &read_file.st_mtim, sizeof file.st_mtim) != 0)))
        load();
}
