/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	int version = 0;
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	int (*ask)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDriverGetVersion") : NULL;

	if (ask == NULL || ask(&version) != 0) {
		printf("libcuda.so.1: %s\n", dlerror());
		return 1;
	}
	printf("libcuda.so.1 is loaded and speaks CUDA %d.%d\n", version / 1000, version % 1000 / 10);
	return 0;
}
