/* SPDX-License-Identifier: Apache-2.0
 *
 * What a container sees, one line each: `node PATH MAJOR:MINOR`, `open PATH ERRNO`, `mknod ERRNO`,
 * `load NAME WORD`, `env NAME=VALUE`, `params LINE`.  Linked against libcuda when NEEDED is defined.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

extern char **environ;
#ifdef NEEDED
int cuDriverGetVersion(int *version);
#endif

static int try_open(const char *path)
{
	int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0)
		return errno;
	close(fd);
	return 0;
}

static void show_nodes(void)
{
	DIR *directory = opendir("/dev");
	struct dirent *entry;
	struct stat status;
	char path[300];

	while (directory != NULL && (entry = readdir(directory)) != NULL) {
		if (strncmp(entry->d_name, "nvidia", 6) != 0)
			continue;
		snprintf(path, sizeof path, "/dev/%s", entry->d_name);
		if (lstat(path, &status) != 0 || !S_ISCHR(status.st_mode))
			continue;
		printf("node %s %u:%u\n", path, major(status.st_rdev), minor(status.st_rdev));
		printf("open %s %s\n", path, strerrorname_np(try_open(path)));
	}
	if (directory != NULL)
		closedir(directory);
}

int main(void)
{
	static const char *const libraries[] = {"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", NULL};
	char line[200];
	FILE *params;

	show_nodes();
	/* GPU 7 is never asked for. */
	mknod("/dev/made", S_IFCHR | 0666, makedev(195, 7));
	printf("mknod %s\n", strerrorname_np(try_open("/dev/made")));
	for (size_t i = 0; libraries[i] != NULL; i++)
		printf("load %s %s\n", libraries[i], dlopen(libraries[i], RTLD_NOW) != NULL ? "yes" : dlerror());
#ifdef NEEDED
	int version = 0;
	int result = cuDriverGetVersion(&version);

	printf("needed %d %d\n", result, version);
#endif
	for (char **entry = environ; *entry != NULL; entry++)
		printf("env %s\n", *entry);
	params = fopen("/proc/driver/nvidia/params", "re");
	while (params != NULL && fgets(line, sizeof line, params) != NULL) {
		if (strncmp(line, "ModifyDeviceFiles", 17) == 0)
			printf("params %s", line);
	}
	return 0;
}
