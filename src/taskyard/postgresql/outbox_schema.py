"""The outbox in SQL: its table, and the function `taskyard.submit` that users call.

Owns the checks that a transaction of a user meets. The broker makes all other checks when it
submits a row, and `outbox` reads and writes rows. Imports nothing, because `database` runs these
statements.
"""

from typing import Final, LiteralString

#: Keys of a line of a campaign file that `options` may have. `name` is an argument, and a bundle is
#: more than one task.
OPTIONS: Final[tuple[LiteralString, ...]] = (
    *("argv", "call", "args", "kwargs", "payload", "after", "service", "lane", "priority"),
    *("due", "expiry", "retries", "backoff", "time_limit", "slots", "cpus", "memory", "gpus"),
    *("resources", "env", "cwd", "inputs", "outputs", "final_exit_status"),
)

_TABLE: Final = (
    (
        "CREATE TABLE taskyard.outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "name text NOT NULL, campaign text NOT NULL, "
        # A line of a campaign file without its name, and without a payload that is not text.
        "task jsonb NOT NULL, payload bytea, bytes integer NOT NULL, "
        "submitted_by text NOT NULL, submitted_at timestamptz NOT NULL, "
        # Why the broker refused it.
        "refused_code text, refused_reason text)"
    ),
    "CREATE INDEX outbox_new ON taskyard.outbox (id) WHERE refused_code IS NULL",
    "CREATE INDEX outbox_refused ON taskyard.outbox (id) WHERE refused_code IS NOT NULL",
)

#: A role that may execute it needs no right on any table. The errors have the code of an invalid
#: parameter. Words of a command are split by the broker, as a shell splits them.
_FUNCTION: Final[LiteralString] = r"""
CREATE FUNCTION taskyard.submit(
    command text DEFAULT NULL,
    name text DEFAULT NULL,
    campaign text DEFAULT '',
    argv text[] DEFAULT NULL,
    call text DEFAULT NULL,
    args jsonb DEFAULT NULL,
    kwargs jsonb DEFAULT NULL,
    payload bytea DEFAULT NULL,
    after text[] DEFAULT NULL,
    service text DEFAULT NULL,
    lane text DEFAULT NULL,
    priority integer DEFAULT NULL,
    due timestamptz DEFAULT NULL,
    expiry timestamptz DEFAULT NULL,
    options jsonb DEFAULT '{}'
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
#variable_conflict use_variable
DECLARE
    known CONSTANT text[] := '{OPTIONS}';
    iso CONSTANT text := 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"';
    own jsonb;
    task jsonb;
    problem text;
    full_name text;
    shown text := 'task ' || to_json(left(name, 100))::text || ': ';
    size bigint;
BEGIN
    campaign := coalesce(campaign, '');
    options := coalesce(options, '{}');
    IF name IS NULL THEN
        name := coalesce(nullif(campaign, ''), 'task') || '-'
            || substr(replace(gen_random_uuid()::text, '-', ''), 1, 20);
    END IF;
    full_name := CASE campaign WHEN '' THEN name ELSE campaign || '/' || name END;
    SELECT coalesce(jsonb_object_agg(key, value), '{}') INTO own FROM (VALUES
        ('argv', coalesce(to_jsonb(argv), to_jsonb(command))), ('call', to_jsonb(call)),
        ('args', args), ('kwargs', kwargs), ('after', to_jsonb(after)),
        ('service', to_jsonb(service)), ('lane', to_jsonb(lane)),
        ('priority', to_jsonb(priority)), ('due', to_jsonb(to_char(due AT TIME ZONE 'UTC', iso))),
        ('expiry', to_jsonb(to_char(expiry AT TIME ZONE 'UTC', iso)))
    ) AS given (key, value) WHERE value IS NOT NULL;
    IF jsonb_typeof(options) <> 'object' THEN
        problem := 'options must be an object';
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(options) AS key WHERE key <> ALL (known)) THEN
        problem := format('unknown option %s (known: %s)', (SELECT to_jsonb(key)
            FROM jsonb_object_keys(options) AS key WHERE key <> ALL (known) LIMIT 1),
            array_to_string(known, ', '));
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(own) AS key WHERE options ? key)
        OR (payload IS NOT NULL AND options ? 'payload') OR num_nonnulls(command, argv) > 1 THEN
        problem := 'an argument is given twice (command is argv as one text)';
    ELSIF name = '' OR octet_length(full_name) > 1024 THEN
        problem := 'a name must have 1 to 1024 bytes, together with its campaign';
    ELSIF full_name ~ '[[:cntrl:]]' THEN
        problem := 'a name must not contain control characters';
    ELSIF strpos(campaign, '/') > 0 THEN
        problem := 'the name of a campaign must not contain /';
    END IF;
    IF problem IS NULL THEN
        task := options || own;
        IF (task ? 'argv')::int + (task ? 'call')::int
            + (task ? 'payload' OR payload IS NOT NULL)::int <> 1 THEN
            problem := 'give one of command, argv, call and payload';
        ELSIF command IS NOT NULL
            AND command !~ $words$^([^'"\\]|\\.|'[^']*'|"([^"\\]|\\.)*")*$$words$ THEN
            problem := 'the command has an open quote (quote it as for a shell, or give argv)';
        ELSIF command !~ '[^[:space:]]' OR cardinality(argv) = 0 OR argv[1] = '' THEN
            problem := 'a command must name a program first';
        ELSIF array_position(argv, NULL) > 0 OR array_position(after, NULL) > 0 THEN
            problem := 'argv and after must not contain nulls';
        ELSIF call !~ '^[^:[:space:]]+:[^:[:space:]]+$' THEN
            problem := 'call must be module:function';
        ELSIF jsonb_typeof(args) <> 'array' THEN
            problem := 'args must be an array';
        ELSIF jsonb_typeof(kwargs) <> 'object' THEN
            problem := 'kwargs must be an object';
        ELSIF abs(priority::bigint) > 1000 THEN
            problem := 'priority must be from -1000 to 1000';
        ELSIF NOT isfinite(due) OR NOT isfinite(expiry) THEN
            problem := 'due and expiry must be finite';
        END IF;
        size := octet_length(task::text) + coalesce(octet_length(payload), 0);
        IF problem IS NULL AND size > 16 * 1024 * 1024 THEN
            problem := 'a task must have at most 16777216 bytes (put the data in a file)';
        END IF;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = concat('taskyard.submit: ', shown, problem);
    END IF;
    INSERT INTO taskyard.outbox
        (name, campaign, task, payload, bytes, submitted_by, submitted_at)
    VALUES (name, campaign, task, payload, size, session_user, clock_timestamp());
    PERFORM pg_notify('taskyard_outbox', '');
    RETURN full_name;
END
$body$
"""

#: The statements that create table and function.
STATEMENTS: Final[tuple[LiteralString, ...]] = (
    *_TABLE,
    _FUNCTION.replace("OPTIONS", ",".join(OPTIONS)),
    "REVOKE EXECUTE ON FUNCTION taskyard.submit FROM PUBLIC",
)
