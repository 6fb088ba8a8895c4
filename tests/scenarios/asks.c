/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints where the loader finds libcuda.so.1, and what the files on the command line hold.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	void *library = dlopen("libcuda.so.1", RTLD_LAZY);
	struct link_map *map = NULL;
	char text[4096];

	if (library != NULL)
		dlinfo(library, RTLD_DI_LINKMAP, &map);
	printf("load %s\n", map != NULL ? map->l_name : dlerror());
	for (int i = 1; i < argc; i++) {
		FILE *file = fopen(argv[i], "re");

		while (file != NULL && fgets(text, sizeof text, file) != NULL)
			printf("%s: %s", argv[i], text);
		putchar('\n');
		if (file != NULL)
			fclose(file);
	}
	return 0;
}
