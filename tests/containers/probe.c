/* SPDX-License-Identifier: Apache-2.0
 *
 * What a container sees and may do, one line each:
 *
 *   node PATH MAJOR:MINOR MODE UID:GID   each device node below /dev but terminals
 *   link PATH MAJOR:MINOR                each link in /dev/dri/by-path, and the node it leads to
 *   open PATH ERRNO                      opening each NVIDIA node; 0 is success
 *   made MINOR ERRNO                     opening 195:MINOR made by mknod, for each MINOR in argv
 *   load NAME PATH|-                     where dlopen found each library
 *   cached NAME                          which of them the loader's cache names
 *   env NAME=VALUE                       the environment, in order
 *   mount LINE                           /proc/self/mountinfo
 *   params LINE                          ModifyDeviceFiles of the driver's parameters
 *
 * At last /bin/needs runs, which the loader may refuse.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <link.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define NVIDIA_MAJOR 195

extern char **environ;

static const char *try_open(const char *path)
{
	int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return strerrorname_np(errno);
	close(fd);
	return "0";
}

static int show_node(const char *path, const struct stat *status, int kind, struct FTW *place)
{
	int is_device = S_ISCHR(status->st_mode) || S_ISBLK(status->st_mode);

	(void)kind;
	if (S_ISLNK(status->st_mode) && strncmp(path, "/dev/dri/by-path/", 17) == 0) {
		struct stat node;

		if (stat(path, &node) != 0)
			printf("link %s %s\n", path, strerrorname_np(errno));
		else
			printf("link %s %u:%u\n", path, major(node.st_rdev), minor(node.st_rdev));
	}
	if (!is_device || strncmp(path, "/dev/pts/", 9) == 0)
		return 0;
	printf("node %s %u:%u %o %u:%u\n", path, major(status->st_rdev), minor(status->st_rdev),
	       status->st_mode & 07777, status->st_uid, status->st_gid);
	if (strncmp(path + place->base, "nvidia", 6) == 0)
		printf("open %s %s\n", path, try_open(path));
	return 0;
}

static void try_made(const char *number)
{
	static const char path[] = "/dev/made";
	unsigned int wanted = 0;

	sscanf(number, "%u", &wanted);
	if (mknod(path, S_IFCHR | 0666, makedev(NVIDIA_MAJOR, wanted)) != 0)
		printf("made %u mknod:%s\n", wanted, strerrorname_np(errno));
	else
		printf("made %u %s\n", wanted, try_open(path));
	unlink(path);
}

static void try_load(const char *name)
{
	void *library = dlopen(name, RTLD_NOW);
	struct link_map *map;

	if (library != NULL && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0)
		printf("load %s %s\n", name, map->l_name);
	else
		printf("load %s -\n", name);
}

static void show_cached(const char *name)
{
	static char cache[1 << 20];
	int fd = open("/etc/ld.so.cache", O_RDONLY | O_CLOEXEC);
	ssize_t size = fd < 0 ? 0 : read(fd, cache, sizeof cache);

	/* With its final zero; the start of a name may be within a path. */
	if (size > 0 && memmem(cache, (size_t)size, name, strlen(name) + 1) != NULL)
		printf("cached %s\n", name);
	close(fd);
}

static void show_lines(const char *path, const char *word, const char *prefix)
{
	char line[4096];
	FILE *file = fopen(path, "re");

	while (file != NULL && fgets(line, sizeof line, file) != NULL) {
		if (strncmp(line, prefix, strlen(prefix)) == 0)
			printf("%s %s", word, line);
	}
	if (file != NULL)
		fclose(file);
}

static int run(const char *program)
{
	char *const arguments[] = {(char *)program, NULL};
	pid_t child;

	if (posix_spawn(&child, program, NULL, NULL, arguments, environ) != 0)
		return 1;
	return waitpid(child, NULL, 0) == child ? 0 : 1;
}

int main(int argc, char **argv)
{
	static const char *const libraries[] = {
		"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libown.so.1"};

	nftw("/dev", show_node, 16, FTW_PHYS);
	for (int i = 1; i < argc; i++)
		try_made(argv[i]);
	for (size_t i = 0; i < sizeof libraries / sizeof libraries[0]; i++) {
		try_load(libraries[i]);
		show_cached(libraries[i]);
	}
	for (char **entry = environ; *entry != NULL; entry++)
		printf("env %s\n", *entry);
	show_lines("/proc/self/mountinfo", "mount", "");
	show_lines("/proc/driver/nvidia/params", "params", "ModifyDeviceFiles:");
	fflush(stdout);
	return run("/bin/needs");
}
