/* SPDX-License-Identifier: Apache-2.0 */
/*
 * WSL's libdxcore.so for tests: the functions that list Windows' adapters and their driver stores,
 * answered from a text file.  Written from Microsoft's documentation of d3dkmthk.h and d3dukmdt.h;
 * WCHAR is the wchar_t of Linux.
 *
 * The file is fakedxcore.conf beside this library.  One entry a line:
 *
 *   adapter PATH           an adapter with the driver store PATH
 *   adapter -              an adapter without a driver store
 *   fault enum CODE        D3DKMTEnumAdapters2 and 3 return CODE
 *   fault query CODE       D3DKMTQueryAdapterInfo returns CODE
 *   fault hangs            D3DKMTEnumAdapters2 and 3 never return
 *   fault crashes          D3DKMTEnumAdapters2 and 3 end the process
 *
 * With -DOLD there is no D3DKMTEnumAdapters3.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_ADAPTERS 8
#define PATH_BYTES 512
#define BUFFER_TOO_SMALL ((int)0xC0000023)
#define INVALID_PARAMETER ((int)0xC000000D)

struct adapter_info {
    uint32_t handle;
    uint32_t luid_low;
    int32_t luid_high;
    uint32_t sources;
    uint32_t moves_preferred;
};

struct enum_adapters2 {
    uint32_t count;
    struct adapter_info *adapters;
};

struct enum_adapters3 {
    uint64_t filter;
    uint32_t count;
    struct adapter_info *adapters;
};

struct query_adapter_info {
    uint32_t handle;
    uint32_t type;
    void *data;
    uint32_t size;
};

struct registry_info {
    uint32_t type;
    uint32_t flags;
    wchar_t name[260];
    uint32_t value_type;
    uint32_t physical_adapter;
    uint32_t output_bytes;
    uint32_t status;
    union {
        uint64_t number;
        wchar_t text[1];
    } output;
};

static char stores[MAX_ADAPTERS][PATH_BYTES];
static uint32_t store_count;
static int enum_fault, query_fault, hangs, crashes;

static void read_file(void)
{
    Dl_info self;
    char path[4096], line[1024], *slash;
    FILE *file;

    store_count = 0;
    if (!dladdr((void *)(uintptr_t)read_file, &self) || !self.dli_fname)
        return;
    snprintf(path, sizeof path - 32, "%s", self.dli_fname);
    slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "fakedxcore.conf");
    file = fopen(path, "r");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "adapter ", 8) && store_count < MAX_ADAPTERS)
            snprintf(stores[store_count++], PATH_BYTES, "%.500s", line + 8);
        else if (!strncmp(line, "fault enum ", 11))
            enum_fault = (int)strtoul(line + 11, NULL, 0);
        else if (!strncmp(line, "fault query ", 12))
            query_fault = (int)strtoul(line + 12, NULL, 0);
        else if (!strcmp(line, "fault hangs"))
            hangs = 1;
        else if (!strcmp(line, "fault crashes"))
            crashes = 1;
    }
    fclose(file);
}

static int enumerate(uint32_t *count, struct adapter_info *adapters)
{
    uint32_t i;

    read_file();
    while (hangs)
        pause();
    if (crashes)
        abort();
    if (enum_fault)
        return enum_fault;
    if (adapters && *count < store_count)
        return BUFFER_TOO_SMALL;
    *count = store_count;
    for (i = 0; adapters && i < store_count; i++)
        adapters[i] = (struct adapter_info){ .handle = 0x40000000 + i, .luid_low = i };
    return 0;
}

EXPORT int D3DKMTEnumAdapters2(struct enum_adapters2 *query)
{
    return enumerate(&query->count, query->adapters);
}

#ifndef OLD
EXPORT int D3DKMTEnumAdapters3(struct enum_adapters3 *query)
{
    return enumerate(&query->count, query->adapters);
}
#endif

EXPORT int D3DKMTQueryAdapterInfo(const struct query_adapter_info *query)
{
    struct registry_info *info = query->data;
    uint32_t adapter = query->handle - 0x40000000, needed, i;
    size_t room;

    if (query_fault)
        return query_fault;
    if (adapter >= store_count || query->type != 48 || query->size < sizeof *info || info->type != 2)
        return INVALID_PARAMETER;
    if (!strcmp(stores[adapter], "-")) {
        info->status = 2;
        return 0;
    }
    needed = (uint32_t)((strlen(stores[adapter]) + 1) * sizeof(wchar_t));
    room = query->size - offsetof(struct registry_info, output);
    info->output_bytes = needed;
    info->status = needed > room;
    if (info->status)
        return 0;
    for (i = 0; i <= strlen(stores[adapter]); i++)
        info->output.text[i] = (unsigned char)stores[adapter][i];
    return 0;
}
