{{/* Ray nodes: the head, the fleet's node (which runs no workers), and one per worker. */}}

{{/* Flags of `ray start`, as KubeRay's rayStartParams. Nodes offer no CPUs, so that only workers run, which request their role's resource.
Arguments: root, numGpus? */}}
{{- define "baton.ray.params" -}}
{{- $ray := .root.Values.ray -}}
{{- $port := int $ray.port -}}
num-cpus: "0"
num-gpus: {{ default 0 .numGpus | int | quote }}
object-store-memory: {{ int64 $ray.objectStoreBytes | quote }}
node-manager-port: {{ add $port 1 | quote }}
object-manager-port: {{ add $port 2 | quote }}
runtime-env-agent-port: {{ add $port 3 | quote }}
dashboard-agent-listen-port: {{ add $port 4 | quote }}
dashboard-agent-grpc-port: {{ add $port 5 | quote }}
metrics-export-port: {{ add $port 6 | quote }}
min-worker-port: {{ int $ray.minWorkerPort | quote }}
max-worker-port: {{ int $ray.maxWorkerPort | quote }}
{{- end -}}

{{/* The same flags as container arguments. */}}
{{- define "baton.ray.args" -}}
{{- range $name, $value := (include "baton.ray.params" . | fromYaml) }}
- --{{ $name }}={{ $value }}
{{- end }}
{{- end -}}

{{/* Arguments of a node that joins the head. Arguments: root, resources? (JSON), numGpus? */}}
{{- define "baton.ray.join" -}}
- start
- --address={{ include "baton.ray.address" .root }}
- --node-ip-address=$(POD_IP)
{{- include "baton.ray.args" . }}
{{- with .resources }}
- {{ printf "--resources=%s" . | quote }}
{{- end }}
- --block
{{- end -}}

{{/* The resource that a worker's node offers and its worker takes. */}}
{{- define "baton.ray.resources" -}}
{{ dict (printf "baton_%s" .role) 1 | toJson }}
{{- end -}}

{{/* Liveness probe of the raylet. It depends on no other process. */}}
{{- define "baton.ray.alive" -}}
tcpSocket: {port: raylet}
periodSeconds: 10
timeoutSeconds: 3
{{- end -}}

{{- define "baton.ray.head.container" -}}
{{- $v := .root.Values -}}
name: ray-head
{{ include "baton.container.image" . }}
{{- if not .isOperators }}
command: [ray]
args:
  - start
  - --head
  - --port={{ int $v.ray.port }}
  - --node-ip-address=$(POD_IP)
  - --include-dashboard=false
  {{- include "baton.ray.args" (dict "root" .root) | nindent 2 }}
  {{- if and $v.ray.gcsFaultTolerance.enabled $v.ray.gcsFaultTolerance.existingSecret }}
  # Ray reads the password only from this variable and passes it to its GCS in the same way.
  - --redis-password=$(RAY_REDIS_PASSWORD)
  {{- end }}
  - --block
{{- end }}
env:
  {{- include "baton.env.pod" .root | nindent 2 }}
  {{- include "baton.env.places" .root | nindent 2 }}
  {{- include "baton.env.ray" . | trim | nindent 2 }}
  {{- if and $v.ray.gcsFaultTolerance.enabled (not .isOperators) }}
  - {name: RAY_REDIS_ADDRESS, value: {{ required "ray.gcsFaultTolerance.redisAddress: HOST:PORT of a Redis of its own is needed" $v.ray.gcsFaultTolerance.redisAddress | quote }}}
  - {name: RAY_external_storage_namespace, value: "{{ .root.Release.Namespace }}-{{ include "baton.fullname" .root }}"}
  {{- with $v.ray.gcsFaultTolerance.existingSecret }}
  - name: RAY_REDIS_PASSWORD
    valueFrom: {secretKeyRef: {name: {{ . }}, key: password}}
  {{- end }}
  {{- end }}
ports:
  - {name: gcs-server, containerPort: {{ int $v.ray.port }}}
  - {name: raylet, containerPort: {{ add (int $v.ray.port) 1 }}}
startupProbe:
  tcpSocket: {port: gcs-server}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  tcpSocket: {port: gcs-server}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  tcpSocket: {port: gcs-server}
  periodSeconds: 10
  timeoutSeconds: 3
resources:
  {{- toYaml $v.ray.head.resources | nindent 2 }}
securityContext:
  {{- toYaml $v.securityContext.container | nindent 2 }}
volumeMounts:
  {{- include "baton.volumeMounts" (dict "root" .root "uses" (list "shm") "values" $v.ray.head) | nindent 2 }}
{{- end -}}

{{/* Twice the size of the object store, as Ray recommends. */}}
{{- define "baton.ray.shmSize" -}}
{{ div (mul 2 (int64 .Values.ray.objectStoreBytes)) 1048576 }}Mi
{{- end -}}

{{- define "baton.ray.head.pod" -}}
{{- include "baton.podSpec" (dict "root" .root "component" "ray-head" "values" .root.Values.ray.head "grace" 30) }}
containers:
  - {{ include "baton.ray.head.container" . | nindent 4 | trim }}
volumes:
  {{- include "baton.volumes" (dict "root" .root "component" "ray-head" "uses" (list "shm") "values" .root.Values.ray.head "shmSize" (include "baton.ray.shmSize" .root)) | nindent 2 }}
{{- end -}}

{{/* The list of what a worker's pod uses. */}}
{{- define "baton.worker.uses" -}}
{{- toYaml (dict "uses" (list "tls" "model" "shm")) -}}
{{- end -}}

{{/* Resources with the pool's devices added. */}}
{{- define "baton.worker.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $limits := default dict $resources.limits -}}
{{- if .gpu.count }}{{ $_ := set $limits .gpu.resource (int .gpu.count) }}{{ end -}}
{{- if .rdma.enabled }}{{ $_ := set $limits (required (printf "pools: %s: rdma.resource, the name that the device plugin gives it, is needed" .name) .rdma.resource) (int .rdma.count) }}{{ end -}}
{{- toYaml (set $resources "limits" $limits) -}}
{{- end -}}

{{- define "baton.worker.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext.container -}}
{{- if .pool.rdma.enabled -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK" | uniq) -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* The container of a worker's Ray node. Arguments: root, pool, isOperators */}}
{{- define "baton.worker.container" -}}
{{- $v := .root.Values -}}
{{- $config := $v.worker.config -}}
{{- $uses := (include "baton.worker.uses" .root | fromYaml).uses -}}
name: worker
{{ include "baton.container.image" (dict "root" .root "image" .pool.image) }}
{{- if not .isOperators }}
command: [ray]
args:
  {{- include "baton.ray.join" (dict "root" .root "resources" (include "baton.ray.resources" .pool) "numGpus" .pool.gpu.count) | nindent 2 }}
{{- end }}
env:
  {{- include "baton.env.pod" .root | nindent 2 }}
  {{- include "baton.env.places" .root | nindent 2 }}
  {{- include "baton.env.ray" . | trim | nindent 2 }}
  {{- include "baton.env.model" .root | trim | nindent 2 }}
  # Settings that override those of the fleet for the worker on this node.
  - {name: BATON_HOST, value: {{ $v.config.host | quote }}}
  - {name: BATON_RPC_PORT, value: {{ int $config.rpc_port | quote }}}
  - {name: BATON_ADMIN_PORT, value: {{ int $config.admin_port | quote }}}
  # Socket for the drain by preStop. It is inside this container, so that no gateway and no API key are needed.
  - {name: BATON_DRAIN_SOCKET, value: /tmp/baton-drain.sock}
  {{- with .pool.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: raylet, containerPort: {{ add (int $v.ray.port) 1 }}}
  - {name: rpc, containerPort: {{ int $config.rpc_port }}}
  - {name: admin, containerPort: {{ int $config.admin_port }}}
startupProbe:
  {{- include "baton.probe.http" (dict "path" "/ready" "port" "admin" "failures" (include "baton.probe.startupFailures" .pool.modelLoadSeconds)) | nindent 2 }}
readinessProbe:
  {{- include "baton.probe.http" (dict "path" "/ready" "port" "admin") | nindent 2 }}
livenessProbe:
  {{- include "baton.ray.alive" . | nindent 2 }}
lifecycle:
  preStop: {exec: {command: [baton, drain, --here, --wait, --limit-s, {{ include "baton.drainLimit.worker" . | quote }}]}}
resources:
  {{- include "baton.worker.resources" .pool | nindent 2 }}
securityContext:
  {{- include "baton.worker.securityContext" . | nindent 2 }}
volumeMounts:
  {{- include "baton.volumeMounts" (dict "root" .root "uses" $uses "values" .pool) | nindent 2 }}
{{- end -}}

{{/* The pod spec of a worker. Arguments: root, pool, isOperators */}}
{{- define "baton.worker.pod" -}}
{{- $uses := (include "baton.worker.uses" .root | fromYaml).uses -}}
{{- include "baton.podSpec" (dict "root" .root "component" "worker" "pool" .pool "values" .pool "grace" (include "baton.grace.worker" .)) }}
containers:
  - {{ include "baton.worker.container" . | nindent 4 | trim }}
volumes:
  {{- include "baton.volumes" (dict "root" .root "component" "worker" "uses" $uses "values" .pool "shmSize" .pool.shmSize) | nindent 2 }}
{{- end -}}

{{- define "baton.worker.metadata" -}}
{{- $checksum := include "baton.config.checksum" (dict "root" .root "service" "fleet") | fromYaml -}}
{{- include "baton.podMetadata" (dict "root" .root "component" "worker" "pool" .pool "values" .pool "checksum" $checksum) -}}
{{- end -}}
