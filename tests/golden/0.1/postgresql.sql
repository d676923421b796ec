-- The tables of a pxrs registry, layout 1, for postgresql.
CREATE TABLE pxrs_entry (
  namespace VARCHAR(64) COLLATE "C" NOT NULL,
  key VARCHAR(512) COLLATE "C" NOT NULL,
  value BYTEA,
  version BIGINT NOT NULL,
  lease VARCHAR(32) COLLATE "C",
  PRIMARY KEY (namespace, key)
)
 WITH (fillfactor = 70);
CREATE TABLE pxrs_lease (
  namespace VARCHAR(64) COLLATE "C" NOT NULL,
  id VARCHAR(32) COLLATE "C" NOT NULL,
  ttl_ms BIGINT NOT NULL,
  expires_ms BIGINT NOT NULL,
  PRIMARY KEY (namespace, id)
)
 WITH (fillfactor = 50);
CREATE TABLE pxrs_meta (
  name VARCHAR(32) COLLATE "C" NOT NULL,
  value VARCHAR(64) COLLATE "C" NOT NULL,
  PRIMARY KEY (name)
);
CREATE INDEX pxrs_entry_lease ON pxrs_entry (namespace, lease) WHERE lease IS NOT NULL;
CREATE SEQUENCE pxrs_version;
INSERT INTO pxrs_meta (name, value) VALUES ('layout', '1');

-- Groups as plain columns, for people; nothing in pxrs needs these views.
CREATE VIEW pxrs_groups_members AS
SELECT
  e.namespace,
  split_part(e.key, '/', 2) AS group_name,
  split_part(e.key, '/', 4) AS incarnation,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'name') AS name,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'topic') AS topic_id,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'topic_name') AS topic_name,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'partitions')::bigint AS partitions,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'host') AS host,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'pid')::bigint AS pid,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'since')::double precision AS since_seconds,
  e.version
FROM pxrs_entry e
WHERE e.key > 'groups/' AND e.key < 'groups0' AND split_part(e.key, '/', 3) = 'members' AND e.version > 0;
CREATE VIEW pxrs_groups_owners AS
SELECT
  e.namespace,
  split_part(e.key, '/', 2) AS group_name,
  split_part(e.key, '/', 4) AS topic_id,
  CAST(split_part(e.key, '/', 5) AS INTEGER) AS partition_number,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'incarnation') AS incarnation,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'name') AS owner,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'epoch')::bigint AS epoch,
  e.version
FROM pxrs_entry e
WHERE e.key > 'groups/' AND e.key < 'groups0' AND split_part(e.key, '/', 3) = 'owners' AND e.version > 0;
CREATE VIEW pxrs_groups_checkpoints AS
SELECT
  e.namespace,
  split_part(e.key, '/', 2) AS group_name,
  split_part(e.key, '/', 4) AS topic_id,
  CAST(split_part(e.key, '/', 5) AS INTEGER) AS partition_number,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'offset')::bigint AS next_offset,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'when')::double precision AS written_seconds,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'by') AS written_by,
  (convert_from(e.value, 'UTF8')::jsonb ->> 'epoch')::bigint AS epoch,
  e.version
FROM pxrs_entry e
WHERE e.key > 'groups/' AND e.key < 'groups0' AND split_part(e.key, '/', 3) = 'checkpoints' AND e.version > 0;

-- Replace pxrs_app by the user that programs connect as.
GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_entry TO pxrs_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON pxrs_lease TO pxrs_app;
GRANT SELECT ON pxrs_meta TO pxrs_app;
GRANT USAGE ON SEQUENCE pxrs_version TO pxrs_app;

