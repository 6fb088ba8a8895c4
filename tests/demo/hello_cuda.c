/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the CUDA version of libcuda and, with an argument, whether cuInit opens the GPUs. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	int version = 0, error;
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	int (*get_version)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDriverGetVersion") : NULL;
	int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;

	(void)argv;
	if (get_version == NULL || init == NULL || get_version(&version) != 0) {
		printf("libcuda.so.1: %s\n", dlerror());
		return 1;
	}
	printf("libcuda.so.1 is loaded and speaks CUDA %d.%d\n", version / 1000, version % 1000 / 10);
	if (argc > 1) {
		error = init(0);
		printf(error == 0 ? "cuInit succeeds\n" : "cuInit fails with error %d\n", error);
	}
	return 0;
}
