/* SPDX-License-Identifier: Apache-2.0
 *
 * A create that Python has answered before, answered again without it.
 *
 * What a request means is not known here.  gpuruntime/launcher/replay.py writes down what of a config.json
 * and of the host an answer came from, and what was added; that is added again if all of it is the
 * same, byte for byte, so that the config.json is the one that Python would write.  In any doubt
 * nothing is touched, and Python decides.  README.md has the format of the file.
 */

#ifndef GPURUNTIME_REPLAY_H
#define GPURUNTIME_REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files.h"
#include "fingerprint.h"
#include "json.h"
#include "kernel.h"
#include "text.h"

/* Only tests set it. */
#ifndef REPLAY
#define REPLAY "/run/gpuruntime/replay"
#endif

enum {
	LARGEST_REPLAY = 1 << 20, LARGEST_REPLAYED = 1 << 20, MOST_ASKING = 256, MOST_SPLICES = 256,
	MOST_PIECES = 4096, DEEPEST_MOUNT = 64,
	/* A document, and an answer. */
	LARGEST_WRITTEN = LARGEST_REPLAYED + LARGEST_REPLAY,
};

/* ---- the file: fields, each a number of bytes, a colon, the bytes and a line feed ---- */

/* The fields from *at* to *end*; *bad* after something that is none. */
struct fields {
	const char *at, *end;
	bool bad;
};

static struct fields fields_of(struct slice slice)
{
	return (struct fields){slice.bytes, slice.bytes + slice.length, false};
}

/* True if there is another field. */
static bool more(const struct fields *fields)
{
	return !fields->bad && fields->at != fields->end;
}

/* The next field; an empty one if there is none. */
static struct slice next(struct fields *fields)
{
	const char *at = fields->at;
	size_t length = 0;

	while (at != fields->end && *at >= '0' && *at <= '9' && length < LARGEST_REPLAY) {
		length = length * 10 + (size_t)(*at - '0');
		at++;
	}
	/* Room for the colon, the bytes and the line feed. */
	if (at == fields->at || (size_t)(fields->end - at) < length + 2 || at[0] != ':' || at[length + 1] != '\n') {
		fields->bad = true;
		return (struct slice){"", 0};
	}
	fields->at = at + length + 2;
	return (struct slice){at + 1, length};
}

/* ---- the document ---- */

/* Values of a container, or 0 for those that it may lack. */
struct parts {
	uint32_t read_only, process, env, user, capabilities, platform, devices, resources, rules, mounts, hooks, annotations;
	bool systemd;
};

/* Parts of the document that have one of the words without which nothing is asked for. */
struct asking {
	size_t count;
	struct slice parts[MOST_ASKING];
};

/* Bytes *start* to *end* of the document go, and *count* pieces come, from *first*. */
struct splice {
	uint32_t start, end;
	size_t first, count;
};

struct replay {
	long directory;
	struct statx before;
	struct json json;
	struct parts parts;
	struct asking env, mounts, annotations;
	size_t splices, pieces;
	struct splice splice[MOST_SPLICES];
	struct slice piece[MOST_PIECES];
	char document[LARGEST_REPLAYED];
	char file[LARGEST_REPLAY];
};

static struct slice text_slice(const char *text)
{
	return (struct slice){text, until(text, '\0')};
}

/* True if *node* is there and is a list of objects. */
static bool is_list_of_objects(const struct json *json, uint32_t node)
{
	if (node == 0 || json->nodes[node].kind != '[')
		return false;
	for (uint32_t at = node + 1; at != json->nodes[node].after; at = json->nodes[at].after) {
		if (json->nodes[at].kind != '{')
			return false;
	}
	return true;
}

/* True if *node* is missing or an object. */
static bool may_be_object(const struct json *json, uint32_t node)
{
	return node == 0 || json->nodes[node].kind == '{';
}

/* How deep the place of a mount is, as a string with quotation marks; 0 if it has more than one
 * spelling, or is deeper than any. */
static size_t depth_of(struct slice place)
{
	size_t depth = 0;

	if (same(place, text_slice("\"/\"")))
		return 1;
	for (size_t i = 1; i + 1 < place.length; i++) {
		const char *at = place.bytes + i;

		if (*at != '/')
			continue;
		depth++;
		if (at[1] == '/' || at[1] == '"' || (at[1] == '.' && (at[2] == '/' || at[2] == '"')))
			return 0;
		if (at[1] == '.' && at[2] == '.' && (at[3] == '/' || at[3] == '"'))
			return 0;
	}
	return place.length > 2 && place.bytes[1] == '/' && depth < DEEPEST_MOUNT ? depth : 0;
}

/* True if each of *mounts* is an object with a place of one spelling. */
static bool are_mounts(const struct json *json, uint32_t mounts)
{
	if (!is_list_of_objects(json, mounts))
		return false;
	for (uint32_t at = mounts + 1; at != json->nodes[mounts].after; at = json->nodes[at].after) {
		const uint32_t place = member(json, at, "\"destination\"");

		if (place == 0 || json->nodes[place].kind != '"' || depth_of(slice_of(json, place)) == 0)
			return false;
	}
	return true;
}

/* True if each of *env* is a string with a name. */
static bool are_variables(const struct json *json, uint32_t env)
{
	if (env == 0 || json->nodes[env].kind != '[')
		return false;
	for (uint32_t at = env + 1; at != json->nodes[env].after; at = json->nodes[at].after) {
		if (json->nodes[at].kind != '"' || !has(slice_of(json, at), text_slice("=")))
			return false;
	}
	return true;
}

/* True if each member of *hooks* is a list of objects. */
static bool are_hooks(const struct json *json, uint32_t hooks)
{
	if (!may_be_object(json, hooks))
		return false;
	for (uint32_t at = hooks + 1; hooks != 0 && at != json->nodes[hooks].after; at = json->nodes[at + 1].after) {
		if (!is_list_of_objects(json, at + 1))
			return false;
	}
	return true;
}

/* True if *namespaces* are none or a list of objects, without one that maps users. */
static bool are_namespaces(const struct json *json, uint32_t namespaces)
{
	if (namespaces == 0)
		return true;
	return is_list_of_objects(json, namespaces) && !has(slice_of(json, namespaces), text_slice("\"user\""));
}

/* True if *node* is missing or a string; leaves whether it is the name of a cgroup of systemd's. */
static bool read_cgroup(const struct json *json, uint32_t node, bool *systemd)
{
	const struct slice name = slice_of(json, node);
	size_t colons = 0;

	if (node != 0 && json->nodes[node].kind != '"')
		return false;
	for (size_t i = 0; node != 0 && i < name.length; i++)
		colons += name.bytes[i] == ':';
	*systemd = colons == 2;
	return true;
}

/* Finds the parts of the document; false if one is not as most engines write it. */
static bool find_parts(const struct json *json, struct parts *parts)
{
	const uint32_t process = member(json, 0, "\"process\"");
	const uint32_t platform = member(json, 0, "\"linux\"");
	const uint32_t root = member(json, 0, "\"root\"");

	/* Of 0, which stands for no member and is the document, nothing is looked for. */
	if (process == 0 || platform == 0 || json->nodes[process].kind != '{' || json->nodes[platform].kind != '{')
		return false;
	parts->read_only = root != 0 ? member(json, root, "\"readonly\"") : 0;
	parts->process = process;
	parts->env = member(json, process, "\"env\"");
	parts->user = member(json, process, "\"user\"");
	parts->capabilities = member(json, process, "\"capabilities\"");
	parts->platform = platform;
	parts->devices = member(json, platform, "\"devices\"");
	parts->resources = member(json, platform, "\"resources\"");
	if (parts->resources == 0 || json->nodes[parts->resources].kind != '{')
		return false;
	parts->rules = member(json, parts->resources, "\"devices\"");
	parts->mounts = member(json, 0, "\"mounts\"");
	parts->hooks = member(json, 0, "\"hooks\"");
	parts->annotations = member(json, 0, "\"annotations\"");
	return may_be_object(json, root) && may_be_object(json, parts->annotations)
		&& may_be_object(json, member(json, platform, "\"netDevices\""))
		&& are_namespaces(json, member(json, platform, "\"namespaces\""))
		&& read_cgroup(json, member(json, platform, "\"cgroupsPath\""), &parts->systemd)
		&& are_variables(json, parts->env) && are_mounts(json, parts->mounts) && are_hooks(json, parts->hooks);
}

/* Reads the *length* bytes of the document, a NUL behind them. */
static bool read_container(struct replay *replay, size_t length)
{
	replay->json.bytes = replay->document;
	return read_document(&replay->json, length) && find_parts(&replay->json, &replay->parts);
}

/* Opens the bundle and reads its config.json; false if it is no ordinary file, or a large one. */
static bool read_bundle(struct replay *replay, const char *bundle)
{
	long fd, length = -1;

	replay->directory = call(SYS_openat, AT_FDCWD, (long)bundle, O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0);
	if (replay->directory < 0)
		return false;
	fd = call(SYS_openat, replay->directory, (long)"config.json", O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0, 0);
	if (fd < 0)
		return false;
	if (look_at((int)fd, "", AT_EMPTY_PATH, &replay->before) == 0 && (replay->before.mode & S_IFMT) == S_IFREG)
		length = read_all(fd, replay->document, sizeof replay->document);
	call(SYS_close, fd, 0, 0, 0, 0);
	if (length < 0 || length == (long)sizeof replay->document)
		return false;
	replay->document[length] = '\0';
	return read_container(replay, (size_t)length);
}

/* ---- what an answer came from ---- */

/* A byte as letters are compared. */
static char lower(char byte)
{
	return byte >= 'A' && byte <= 'Z' ? (char)(byte | 0x20) : byte;
}

/* True if the name *name*, in quotation marks, differs from *known* by nothing but case. */
static bool is_misspelled(struct slice name, struct slice known)
{
	bool differs = false;

	if (name.length != known.length + 2)
		return false;
	for (size_t i = 0; i < known.length; i++) {
		const char byte = name.bytes[i + 1];

		if (lower(byte) != lower(known.bytes[i]))
			return false;
		differs = differs || byte != known.bytes[i];
	}
	return differs;
}

/* True if each name of a member is ASCII, and none is one of *known* in other letters. */
static bool are_spelled(const struct json *json, struct fields known)
{
	for (uint32_t node = 0; node < json->count; node++) {
		const struct slice name = slice_of(json, node);
		struct fields names = known;

		if (json->nodes[node].kind != KEY)
			continue;
		for (size_t i = 0; i < name.length; i++) {
			if ((uint8_t)name.bytes[i] >= 0x80)
				return false;
		}
		while (more(&names)) {
			if (is_misspelled(name, next(&names)))
				return false;
		}
	}
	return true;
}

/* True if one of *words* is in *part*. */
static bool has_word(struct slice part, struct fields words)
{
	while (more(&words)) {
		const struct slice word = next(&words);

		if (word.length == 0 || has(part, word))
			return true;
	}
	return false;
}

/* Finds the parts of *node*, an object or an array, that have one of *words*; false if too many. */
static bool find_asking(const struct json *json, uint32_t node, struct fields words, struct asking *found)
{
	const uint32_t end = json->nodes[node].after;

	for (uint32_t at = node + 1; node != 0 && at != end;) {
		/* A name, and the value behind it, or a value alone. */
		const uint32_t last = json->nodes[at].kind == KEY ? at + 1 : at;
		const uint32_t start = json->nodes[at].start;
		const struct slice part = {json->bytes + start, json->nodes[last].end - start};

		at = json->nodes[last].after;
		if (!has_word(part, words))
			continue;
		if (found->count == MOST_ASKING)
			return false;
		found->parts[found->count] = part;
		found->count++;
	}
	return true;
}

/* True if *found* are the fields of *expected*. */
static bool are_same(const struct asking *found, struct slice expected)
{
	struct fields fields = fields_of(expected);

	for (size_t i = 0; i < found->count; i++) {
		if (!more(&fields) || !same(next(&fields), found->parts[i]) || fields.bad)
			return false;
	}
	return fields.at == fields.end && !fields.bad;
}

/* True if *node* has the bytes *expected*, none at all if it is missing. */
static bool is_value(const struct json *json, uint32_t node, struct slice expected)
{
	return same(node != 0 ? slice_of(json, node) : (struct slice){"", 0}, expected);
}

/* True if the document, and how we were called, are what *conditions* say. */
static bool fits_document(const struct replay *replay, struct fields conditions, const char *called, char **envp)
{
	const struct json *json = &replay->json;
	const struct parts *parts = &replay->parts;
	const char *directories = value_of(envp, "PATH");

	return same(next(&conditions), text_slice(called))
		&& same(next(&conditions), text_slice(directories != NULL ? directories : ""))
		&& same(next(&conditions), text_slice(parts->systemd ? "1" : "0"))
		&& is_value(json, parts->read_only, next(&conditions))
		&& is_value(json, parts->capabilities, next(&conditions))
		&& is_value(json, parts->user, next(&conditions))
		&& is_value(json, parts->devices, next(&conditions))
		&& is_value(json, parts->rules, next(&conditions))
		&& are_same(&replay->env, next(&conditions))
		&& are_same(&replay->mounts, next(&conditions))
		&& are_same(&replay->annotations, next(&conditions))
		&& conditions.at == conditions.end && !conditions.bad;
}

/* True if the host answers as *probes* say: operation, argument and answer of each. */
static bool fits_host(struct fields probes, char **envp)
{
	while (more(&probes)) {
		const struct slice operation = next(&probes);
		const struct slice argument = next(&probes);
		const struct slice expected = next(&probes);

		if (probes.bad || !holds(operation, argument, expected, envp))
			return false;
	}
	return !probes.bad;
}

/* ---- what is added ---- */

/* Begins a splice in place of *start* to *end*; false if there is no room. */
static bool begin_splice(struct replay *replay, uint32_t start, uint32_t end)
{
	if (replay->splices == MOST_SPLICES)
		return false;
	replay->splice[replay->splices] = (struct splice){start, end, replay->pieces, 0};
	replay->splices++;
	return true;
}

/* Adds *piece* to the splice that was begun last; false if there is no room. */
static bool add(struct replay *replay, struct slice piece)
{
	if (replay->pieces == MOST_PIECES)
		return false;
	replay->piece[replay->pieces] = piece;
	replay->pieces++;
	replay->splice[replay->splices - 1].count++;
	return true;
}

/* Begins a splice at the end of *node*, an object or an array, behind its parts. */
static bool begin_at_end(struct replay *replay, uint32_t node)
{
	const struct node *whole = &replay->json.nodes[node];

	if (!begin_splice(replay, whole->end - 1, whole->end - 1))
		return false;
	return whole->after == node + 1 || add(replay, text_slice(","));
}

/* Gives *node* the *value*, or if it is 0 *parent* a last member *name*, in quotation marks.  Without
 * a value, which nothing has that was not there, nothing changes. */
static bool set(struct replay *replay, uint32_t parent, uint32_t node, const char *name, struct slice value)
{
	const struct node *whole = &replay->json.nodes[node];

	if (value.length == 0)
		return true;
	if (node != 0)
		return begin_splice(replay, whole->start, whole->end) && add(replay, value);
	return begin_at_end(replay, parent) && add(replay, text_slice(name)) && add(replay, text_slice(":"))
		&& add(replay, value);
}

/* True if two entries of an environment, with quotation marks, have the same name. */
static bool same_name(struct slice a, struct slice b)
{
	size_t at = 0;

	while (at < a.length && at < b.length && a.bytes[at] == b.bytes[at]) {
		if (a.bytes[at] == '=')
			return true;
		at++;
	}
	return false;
}

/* Sets the variables *entries*: in place of the last of the same name, else behind all. */
static bool set_variables(struct replay *replay, struct fields entries)
{
	const struct json *json = &replay->json;
	const uint32_t env = replay->parts.env;
	const uint32_t end = json->nodes[env].after;
	struct fields rest = entries;
	bool empty = end == env + 1, began = false;

	for (int appends = 0; appends < 2; appends++) {
		rest = entries;
		while (more(&rest)) {
			const struct slice entry = next(&rest);
			uint32_t place = 0;

			for (uint32_t at = env + 1; at != end; at = json->nodes[at].after) {
				if (same_name(slice_of(json, at), entry))
					place = at;
			}
			if (place != 0) {
				if (appends == 0 && !set(replay, env, place, "", entry))
					return false;
				continue;
			}
			if (appends == 0)
				continue;
			if (!began && !begin_splice(replay, json->nodes[env].end - 1, json->nodes[env].end - 1))
				return false;
			began = true;
			if ((!empty && !add(replay, text_slice(","))) || !add(replay, entry))
				return false;
			empty = false;
		}
	}
	return !rest.bad;
}

/* Puts the mount *mount* behind those before it. */
static bool put_mount(struct replay *replay, struct slice mount, bool *first)
{
	const bool separated = *first || add(replay, text_slice(","));

	*first = false;
	return separated && add(replay, mount);
}

/* Puts those at *depth*, first the document's, then those of *added*; false if two have one place. */
static bool put_mounts(struct replay *replay, struct fields added, size_t depth, bool *first)
{
	const struct json *json = &replay->json;
	const uint32_t mounts = replay->parts.mounts;

	for (uint32_t at = mounts + 1; at != json->nodes[mounts].after; at = json->nodes[at].after) {
		const struct slice place = slice_of(json, member(json, at, "\"destination\""));
		struct fields others = added;

		if (depth_of(place) != depth)
			continue;
		while (more(&others)) {
			if (same(next(&others), place))
				return false;
			next(&others);
		}
		if (!put_mount(replay, slice_of(json, at), first))
			return false;
	}
	while (more(&added)) {
		const struct slice place = next(&added);
		const struct slice mount = next(&added);

		if (depth_of(place) == depth && !put_mount(replay, mount, first))
			return false;
	}
	return !added.bad;
}

/* Adds the mounts *added*, place and mount of each, and sorts all by depth, stably. */
static bool add_mounts(struct replay *replay, struct fields added)
{
	const struct node *whole = &replay->json.nodes[replay->parts.mounts];
	bool first = true;

	if (!more(&added))
		return !added.bad;
	for (struct fields rest = added; more(&rest); next(&rest)) {
		if (depth_of(next(&rest)) == 0)
			return false;
	}
	if (!begin_splice(replay, whole->start + 1, whole->end - 1))
		return false;
	for (size_t depth = 1; depth < DEEPEST_MOUNT; depth++) {
		if (!put_mounts(replay, added, depth, &first))
			return false;
	}
	return true;
}

/* Adds the hooks *added*: the name of a list, in quotation marks, and what comes behind its own. */
static bool add_hooks(struct replay *replay, struct fields added)
{
	const struct json *json = &replay->json;
	const uint32_t hooks = replay->parts.hooks;
	bool empty = hooks == 0 || json->nodes[hooks].after == hooks + 1;
	bool ended = hooks == 0;

	if (!more(&added))
		return !added.bad;
	if (hooks == 0 && !(begin_at_end(replay, 0) && add(replay, text_slice("\"hooks\":{"))))
		return false;
	/* First the lists that are there, which come before the end of the object. */
	for (struct fields rest = added; hooks != 0 && more(&rest);) {
		static struct text name;
		const struct slice called = next(&rest), items = next(&rest);
		uint32_t list;

		clear(&name);
		append_bytes(&name, called.bytes, called.length);
		list = member(json, hooks, name.bytes);
		if (list != 0 && !(begin_at_end(replay, list) && add(replay, items)))
			return false;
	}
	while (more(&added)) {
		static struct text name;
		const struct slice called = next(&added), items = next(&added);

		clear(&name);
		append_bytes(&name, called.bytes, called.length);
		if (hooks != 0 && member(json, hooks, name.bytes) != 0)
			continue;
		if (!ended && !begin_splice(replay, json->nodes[hooks].end - 1, json->nodes[hooks].end - 1))
			return false;
		ended = true;
		if ((!empty && !add(replay, text_slice(","))) || !add(replay, called) || !add(replay, text_slice(":["))
			|| !add(replay, items) || !add(replay, text_slice("]")))
			return false;
		empty = false;
	}
	return (hooks != 0 || add(replay, text_slice("}"))) && !added.bad;
}

/* Puts the splices in the order of their places, stably. */
static void sort_splices(struct replay *replay)
{
	for (size_t i = 1; i < replay->splices; i++) {
		const struct splice moved = replay->splice[i];
		size_t at = i;

		while (at > 0 && replay->splice[at - 1].start > moved.start) {
			replay->splice[at] = replay->splice[at - 1];
			at--;
		}
		replay->splice[at] = moved;
	}
}

/* Leaves in the splices what *added* says; false if there is no room, or it is not to be had. */
static bool splice(struct replay *replay, struct fields added)
{
	const struct parts *parts = &replay->parts;
	const struct slice user = next(&added), devices = next(&added), rules = next(&added);
	const struct slice env = next(&added), mounts = next(&added), hooks = next(&added);

	replay->splices = replay->pieces = 0;
	if (added.bad || added.at != added.end)
		return false;
	if (!set(replay, parts->process, parts->user, "\"user\"", user)
		|| !set(replay, parts->platform, parts->devices, "\"devices\"", devices)
		|| !set(replay, parts->resources, parts->rules, "\"devices\"", rules)
		|| !set_variables(replay, fields_of(env)) || !add_mounts(replay, fields_of(mounts))
		|| !add_hooks(replay, fields_of(hooks)))
		return false;
	sort_splices(replay);
	return true;
}

/* ---- all of it ---- */

/* Finds among the *records* one that fits, and leaves in the splices what it adds. */
static bool find_record(struct replay *replay, struct fields records, const char *called, char **envp)
{
	while (more(&records)) {
		struct fields parts = fields_of(next(&records));
		const struct slice conditions = next(&parts), probes = next(&parts), added = next(&parts);

		if (parts.bad || parts.at != parts.end)
			return false;
		if (fits_document(replay, fields_of(conditions), called, envp))
			return fits_host(fields_of(probes), envp) && splice(replay, fields_of(added));
	}
	return false;
}

/* Reads the file of answers for the *config* that is in force; false if there is none to believe. */
static bool read_replay(struct replay *replay, const char *config, struct slice *content)
{
	static struct statx self;
	static struct text head;
	long length;

	if (look_at(AT_FDCWD, "/proc/self/exe", 0, &self) != 0)
		return false;
	clear(&head);
	append(&head, "gpuruntime-replay 3 " VERSION "\n");
	append(&head, config);
	append(&head, "launcher ");
	append_device(&head, &self);
	append(&head, ":");
	append_number(&head, self.ino);
	append(&head, "\nuser ");
	append_number(&head, (uint64_t)call(SYS_geteuid, 0, 0, 0, 0, 0));
	append(&head, "\n");
	clear(&path);
	append(&path, REPLAY);
	length = read_trusted(replay->file, sizeof replay->file);
	if (length < (long)head.length || !starts_with(replay->file, head.bytes, head.length))
		return false;
	*content = (struct slice){replay->file + head.length, (size_t)length - head.length};
	return true;
}

/* Finds in *file*, which is behind its head, what fits the document, and leaves it in the splices. */
static bool find_answer(struct replay *replay, struct slice file, const char *called, char **envp)
{
	const struct json *json = &replay->json;
	struct fields content = fields_of(file);
	const struct fields words = fields_of(next(&content));
	const struct fields names = fields_of(next(&content));
	const struct fields records = fields_of(next(&content));

	/* Whole to its end, or nothing of it counts. */
	if (content.bad || content.at != content.end || !are_spelled(json, names))
		return false;
	if (replay->parts.hooks != 0 && has_word(slice_of(json, replay->parts.hooks), words))
		return false;
	replay->env.count = replay->mounts.count = replay->annotations.count = 0;
	return find_asking(json, replay->parts.env, words, &replay->env)
		&& find_asking(json, replay->parts.mounts, words, &replay->mounts)
		&& find_asking(json, replay->parts.annotations, words, &replay->annotations)
		&& find_record(replay, records, called, envp);
}

/* Prepares the create in *bundle* by an answer that was given before, to us as *called* under
 * *config*.  Leaves in *unknown* whether an answer would help the next time. */
static bool prepare_replay(
	struct replay *replay, const char *bundle, const char *called, char **envp, const char *config, bool *unknown)
{
	struct slice file;

	if (!read_bundle(replay, bundle))
		return false;
	*unknown = true;
	return read_replay(replay, config, &file) && find_answer(replay, file, called, envp);
}

/* Collects what is written to *fd*; *failed* once that could not be. */
struct writer {
	long fd;
	size_t length;
	bool failed;
	char bytes[1 << 16];
};

static void flush(struct writer *writer)
{
	size_t done = 0;

	while (!writer->failed && done < writer->length) {
		const long count = call(
			SYS_write, writer->fd, (long)(writer->bytes + done), (long)(writer->length - done), 0, 0);

		if (count <= 0)
			writer->failed = true;
		else
			done += (size_t)count;
	}
	writer->length = 0;
}

static void write_slice(struct writer *writer, struct slice slice)
{
	for (size_t i = 0; i < slice.length; i++) {
		if (writer->length == sizeof writer->bytes)
			flush(writer);
		writer->bytes[writer->length] = slice.bytes[i];
		writer->length++;
	}
}

/* Writes the document with what is added to it to *fd*; false if that cannot be. */
static bool write_document(const struct replay *replay, long fd)
{
	static struct writer writer;
	const char *bytes = replay->json.bytes;
	size_t at = 0;

	writer.fd = fd;
	for (size_t i = 0; i < replay->splices; i++) {
		const struct splice *splice = &replay->splice[i];

		write_slice(&writer, (struct slice){bytes + at, splice->start - at});
		for (size_t piece = 0; piece < splice->count; piece++)
			write_slice(&writer, replay->piece[splice->first + piece]);
		at = splice->end;
	}
	write_slice(&writer, (struct slice){bytes + at, replay->json.out - at});
	flush(&writer);
	return !writer.failed;
}

/* Gives *fd* the owner and the mode that config.json has; false if that cannot be. */
static bool keep_owner(const struct replay *replay, long fd)
{
	static struct statx ours;
	const struct statx *before = &replay->before;

	if (look_at((int)fd, "", AT_EMPTY_PATH, &ours) != 0)
		return false;
	if ((ours.uid != before->uid || ours.gid != before->gid)
		&& call(SYS_fchown, fd, before->uid, before->gid, 0, 0) != 0)
		return false;
	return call(SYS_fchmod, fd, before->mode & 07777, 0, 0, 0) == 0;
}

/* True unless a file of ours could reach the limit of files' sizes, where a signal would end us. */
static bool may_write(void)
{
	static struct resource_limit limit;

	return call(SYS_prlimit64, 0, RLIMIT_FSIZE, 0, (long)&limit, 0) == 0 && limit.soft >= LARGEST_WRITTEN;
}

/* Replaces config.json by what was prepared, as gpuruntime/oci/bundle.py does; false, and it is what
 * it was, if that cannot be. */
static bool store_replay(const struct replay *replay)
{
	static const char digits[] = "0123456789abcdef";
	static struct text name;
	uint8_t random[8];
	long fd;
	bool stored;

	if (!may_write() || call(SYS_getrandom, (long)random, sizeof random, 0, 0, 0) != (long)sizeof random)
		return false;
	clear(&name);
	append(&name, ".config.json.");
	for (size_t i = 0; i < sizeof random; i++) {
		append_bytes(&name, digits + (random[i] >> 4), 1);
		append_bytes(&name, digits + (random[i] & 15), 1);
	}
	fd = call(SYS_openat, replay->directory, (long)name.bytes,
		O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600, 0);
	if (fd < 0)
		return false;
	stored = write_document(replay, fd) && keep_owner(replay, fd);
	/* Some file systems say only there that there was no room. */
	stored = call(SYS_close, fd, 0, 0, 0, 0) == 0 && stored;
	stored = stored
		&& call(SYS_renameat, replay->directory, (long)name.bytes, replay->directory, (long)"config.json", 0) == 0;
	if (!stored)
		call(SYS_unlinkat, replay->directory, (long)name.bytes, 0, 0, 0);
	return stored;
}

#endif
