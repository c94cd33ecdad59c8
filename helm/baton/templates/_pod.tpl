{{/*
Parts of pods. `uses` says what a container needs, and both its volumes and its mounts follow from it:
config, api-keys, tls, front-tls, model, shm. Every container has /tmp and the cache.
*/}}

{{/* What a service's pod uses. root, uses */}}
{{- define "baton.uses" -}}
{{- $uses := .uses -}}
{{- if not .root.Values.tls.enabled }}{{ $uses = without $uses "tls" }}{{ end -}}
{{- if not .root.Values.frontTls.enabled }}{{ $uses = without $uses "front-tls" }}{{ end -}}
{{- if not .root.Values.apiKeys.enabled }}{{ $uses = without $uses "api-keys" }}{{ end -}}
{{- if or (eq .root.Values.model.source "image") (and (eq .root.Values.model.source "hub") (not .root.Values.model.hub.claimName)) }}{{ $uses = without $uses "model" }}{{ end -}}
{{- toYaml (dict "uses" $uses) -}}
{{- end -}}

{{/* root, component, uses, values, shmSize? */}}
{{- define "baton.volumes" -}}
{{- $v := .root.Values -}}
{{- $uses := (include "baton.uses" . | fromYaml).uses -}}
- name: tmp
  emptyDir: {sizeLimit: {{ $v.volumes.tmpSize }}}
- name: cache
  emptyDir: {sizeLimit: {{ $v.volumes.cacheSize }}}
{{- if has "config" $uses }}
- name: config
  configMap:
    name: {{ include "baton.fullname" .root }}-config
    items: [{key: {{ .component }}.yaml, path: {{ .component }}.yaml}]
{{- end }}
{{- if has "api-keys" $uses }}
- name: api-keys
  secret:
    secretName: {{ include "baton.secret.apiKeys" .root }}
    items: [{key: keys.yaml, path: keys.yaml}]
    defaultMode: 0440
{{- end }}
{{- if has "tls" $uses }}
- name: tls
  secret: {secretName: {{ include "baton.secret.tls" .root }}, defaultMode: 0440}
{{- end }}
{{- if has "front-tls" $uses }}
- name: front-tls
  secret: {secretName: {{ include "baton.secret.frontTls" .root }}, defaultMode: 0440}
{{- end }}
{{- if has "front-ca" $uses }}
- name: front-ca
  secret:
    secretName: {{ include "baton.secret.frontTls" .root }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- if has "model" $uses }}
- name: model
  persistentVolumeClaim:
    claimName: {{ ternary $v.model.hub.claimName $v.model.pvc.claimName (eq $v.model.source "hub") }}
    {{- if eq $v.model.source "pvc" }}
    readOnly: true
    {{- end }}
{{- end }}
{{- if has "shm" $uses }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shmSize }}}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* root, uses, values */}}
{{- define "baton.volumeMounts" -}}
{{- $v := .root.Values -}}
{{- $uses := (include "baton.uses" . | fromYaml).uses -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/baton}
{{- range $name := list "config" "api-keys" "tls" "front-tls" "front-ca" }}
{{- if has $name $uses }}
- {name: {{ $name }}, mountPath: /etc/baton/{{ $name }}, readOnly: true}
{{- end }}
{{- end }}
{{- if has "model" $uses }}
{{- if eq $v.model.source "pvc" }}
- name: model
  mountPath: {{ $v.model.pvc.mountPath }}
  {{- with $v.model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- else }}
- {name: model, mountPath: /var/cache/baton/huggingface}
{{- end }}
{{- end }}
{{- if has "shm" $uses }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where a process may write, with a root file system that it may not. */}}
{{- define "baton.env.places" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /var/cache/baton}
- {name: TRITON_CACHE_DIR, value: /var/cache/baton/triton}
{{- end -}}

{{- define "baton.env.pod" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- define "baton.env.advertise" -}}
- name: BATON_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- define "baton.env.redis" -}}
{{- if .Values.redis.existingSecret }}
- name: BATON_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.existingSecretKey }}}}
{{- else if .Values.redis.url }}
- {name: BATON_REDIS_URL, value: {{ .Values.redis.url | quote }}}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.secret.redis" . }}, key: password}}
- {name: BATON_REDIS_URL, value: "redis://:$(REDIS_PASSWORD)@{{ include "baton.fullname" . }}-redis:6379/0"}
{{- end }}
{{- end -}}

{{- define "baton.secret.redis" -}}
{{- default (printf "%s-redis" (include "baton.fullname" .)) .Values.redis.bundled.existingSecret -}}
{{- end -}}

{{/* Where the hub's own tools keep and find models. */}}
{{- define "baton.env.model" -}}
{{- if eq .Values.model.source "hub" }}
- {name: HF_HOME, value: /var/cache/baton/huggingface}
{{- if .Values.model.hub.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.model.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- else }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end -}}

{{/* How `baton drain` and `baton status` in a pod find the gateway, also one that is not ready; its certificate has the name that clients use. */}}
{{- define "baton.env.admin" -}}
- {name: BATON_GATEWAY, value: "{{ include "baton.fullname" . }}-gateway-drain:{{ int .Values.gateway.config.grpc_port }}"}
{{- if .Values.frontTls.enabled }}
- {name: BATON_GATEWAY_CA, value: /etc/baton/front-ca/ca.crt}
- {name: BATON_GATEWAY_NAME, value: {{ include "baton.fullname" . }}-gateway}
{{- end }}
{{- if .Values.apiKeys.enabled }}
- name: BATON_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "baton.secret.apiKeys" . }}, key: admin-key}}
{{- end }}
{{- end -}}

{{/* "true" where the operator gives Ray's containers their token itself. */}}
{{- define "baton.ray.operatorHasToken" -}}
{{- if and (eq .Values.runtime.mode "kuberay") (eq .Values.kuberay.apiLevel "1.6") }}true{{ end -}}
{{- end -}}

{{/* root, isOperators: whether it is a container of KubeRay's */}}
{{- define "baton.env.ray" -}}
{{- if not (and .isOperators (include "baton.ray.operatorHasToken" .root)) }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "baton.secret.ray" .root }}, key: auth_token}}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# What workers log is the pod's log, and not files in /tmp; Ray's own processes say little there.
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: RAY_BACKEND_LOG_LEVEL, value: error}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
# A node is never idle while its worker lives: the worker has been drained before, by preStop.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
{{- end -}}

{{/* root, values, image? */}}
{{- define "baton.container.image" -}}
image: {{ include "baton.image" . | quote }}
imagePullPolicy: {{ include "baton.pullPolicy" . }}
{{- end -}}

{{/* port, path, then what is not a default of Kubernetes */}}
{{- define "baton.probe.http" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
periodSeconds: {{ default 5 .period }}
timeoutSeconds: 3
failureThreshold: {{ default 3 .failures }}
{{- end -}}

{{/* Once a started process has had its time: `seconds`, looked at every 5. */}}
{{- define "baton.probe.startupFailures" -}}
{{- divf . 5 | ceil | int -}}
{{- end -}}

{{/* Endpoints, proxies and balancers need a moment to send nobody here any more; the process itself says 503 at once. */}}
{{- define "baton.preStop.sleep" -}}
preStop: {exec: {command: [sleep, {{ int .Values.drain.endpointPropagationSeconds | quote }}]}}
{{- end -}}

{{/*
How long Kubernetes waits between preStop and SIGKILL: what preStop takes, what the process may take to drain, what it then waits for, and
ten seconds to end. root, drain_s, after? (seconds)
*/}}
{{- define "baton.grace" -}}
{{- add (int .root.Values.drain.endpointPropagationSeconds) (include "baton.seconds" .drain_s | int) (default 0 .after | int) 10 -}}
{{- end -}}

{{/* Beyond its drain decode hands over what it still runs (5 s), and prefill keeps KV until its readers have it, at most a lease. root, pool */}}
{{- define "baton.afterDrain.worker" -}}
{{- $handOver := ternary 0 5 (eq .pool.role "prefill") -}}
{{- $lease := ternary 0 (include "baton.seconds" .root.Values.fleet.config.lease_s | int) (eq .pool.role "decode") -}}
{{- add $handOver $lease -}}
{{- end -}}

{{- define "baton.grace.worker" -}}
{{- include "baton.grace" (dict "root" .root "drain_s" .root.Values.fleet.config.drain_s "after" (include "baton.afterDrain.worker" .)) -}}
{{- end -}}

{{/* How long preStop waits for it. */}}
{{- define "baton.drainLimit.worker" -}}
{{- add (include "baton.seconds" .root.Values.fleet.config.drain_s | int) (include "baton.afterDrain.worker" . | int) -}}
{{- end -}}

{{/* What every pod has. root, component, values, grace, pool?, needsApi?: KubeRay gives it an account, for Ray's autoscaler */}}
{{- define "baton.podSpec" -}}
{{- $v := .root.Values -}}
{{- if not .needsApi -}}
serviceAccountName: {{ include "baton.serviceAccountName" . }}
automountServiceAccountToken: false
{{ end -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- toYaml $v.securityContext.pod | nindent 2 }}
{{- with $v.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (include "baton.affinity" . | fromYaml) }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $v.topologySpread.enabled (has .component (list "gateway" "scheduler" "worker")) }}
topologySpreadConstraints:
  - topologyKey: {{ $v.topologySpread.topologyKey }}
    maxSkew: {{ int $v.topologySpread.maxSkew }}
    whenUnsatisfiable: {{ $v.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* The user's, and for pools the wish to be near the other workers. */}}
{{- define "baton.affinity" -}}
{{- $affinity := deepCopy (default dict .values.affinity) -}}
{{- with .values.colocateBy -}}
{{- $labels := dict "app.kubernetes.io/instance" $.root.Release.Name "app.kubernetes.io/component" "worker" -}}
{{- $near := dict "weight" 100 "podAffinityTerm" (dict "topologyKey" . "labelSelector" (dict "matchLabels" $labels)) -}}
{{- $pods := deepCopy (default dict $affinity.podAffinity) -}}
{{- $wishes := append (default list $pods.preferredDuringSchedulingIgnoredDuringExecution) $near -}}
{{- $_ := set $pods "preferredDuringSchedulingIgnoredDuringExecution" $wishes -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* A pod template's metadata. root, component, values, pool?, checksum? */}}
{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.podLabels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := mergeOverwrite (default dict .checksum) (deepCopy (default dict .values.podAnnotations)) }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
