/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's environment, which the runtime role alone reads.
 */

#ifndef GPURUNTIME_ENVIRONMENT_H
#define GPURUNTIME_ENVIRONMENT_H

#include <stddef.h>

#include "text.h"

/* The value of *name*: its first entry, as getenv(3); NULL if unset or empty. */
static const char *value_of(char **envp, const char *name)
{
	const size_t length = until(name, '\0');

	for (; *envp != NULL; envp++) {
		if (starts_with(*envp, name, length) && (*envp)[length] == '=') {
			const char *value = *envp + length + 1;

			return *value != '\0' ? value : NULL;
		}
	}
	return NULL;
}

#endif
