{{/*
Parts of pods. `uses` lists what a container needs. Its volumes and mounts follow from this list:
config, api-keys, tls, front-tls, front-ca, model, shm. Every container has /tmp and the cache.
*/}}

{{/* The list of what a pod uses, without disabled features. Arguments: root, uses */}}
{{- define "baton.uses" -}}
{{- $uses := .uses -}}
{{- if not .root.Values.tls.enabled }}{{ $uses = without $uses "tls" }}{{ end -}}
{{- if not .root.Values.frontTls.enabled }}{{ $uses = without $uses "front-tls" "front-ca" }}{{ end -}}
{{- if not .root.Values.apiKeys.enabled }}{{ $uses = without $uses "api-keys" }}{{ end -}}
{{- if or (eq .root.Values.model.source "image") (and (eq .root.Values.model.source "hub") (not .root.Values.model.hub.claimName)) }}{{ $uses = without $uses "model" }}{{ end -}}
{{- toYaml (dict "uses" $uses) -}}
{{- end -}}

{{/* Volumes of a pod. Arguments: root, component, uses, values, shmSize? */}}
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
    # A certificate of a public CA has none.
    optional: true
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

{{/* Volume mounts of a container. Arguments: root, uses, values */}}
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

{{/* Environment variables that point to the writable volumes, because the root file system is read-only. */}}
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

{{/* Environment variables of the hub client: its cache and token. */}}
{{- define "baton.env.hub" -}}
- {name: HF_HOME, value: /var/cache/baton/huggingface}
{{- with .Values.model.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end -}}

{{- define "baton.env.model" -}}
{{- if eq .Values.model.source "hub" }}
{{ include "baton.env.hub" . }}
{{- if .Values.model.hub.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- else }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end -}}

{{/* "true" if the KubeRay operator passes the token to Ray's containers. */}}
{{- define "baton.ray.operatorHasToken" -}}
{{- if and (eq .Values.runtime.mode "kuberay") (eq .Values.kuberay.apiLevel "1.6") }}true{{ end -}}
{{- end -}}

{{/* Environment of Ray's containers. Arguments: root, isOperators (a container of KubeRay) */}}
{{- define "baton.env.ray" -}}
{{- if not (and .isOperators (include "baton.ray.operatorHasToken" .root)) }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "baton.secret.ray" .root }}, key: auth_token}}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Workers log to the pod's log instead of files in /tmp. Ray's own processes log little.
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: RAY_BACKEND_LOG_LEVEL, value: error}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
# A node is never idle while its worker lives, and preStop has already drained the worker.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
{{- end -}}

{{/* Image and pull policy of a container. Arguments: root, values, image? */}}
{{- define "baton.container.image" -}}
image: {{ include "baton.image" . | quote }}
imagePullPolicy: {{ include "baton.pullPolicy" . }}
{{- end -}}

{{/* An HTTP probe. Arguments: port, path, and probe settings that differ from Kubernetes' defaults */}}
{{- define "baton.probe.http" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
periodSeconds: {{ default 5 .period }}
timeoutSeconds: 3
failureThreshold: {{ default 3 .failures }}
{{- end -}}

{{/* Failure threshold of a startup probe for `seconds`, with a period of 5 seconds. */}}
{{- define "baton.probe.startupFailures" -}}
{{- divf . 5 | ceil | int -}}
{{- end -}}

{{/* Wait until endpoints, proxies and load balancers have stopped sending requests. The process then answers 503 immediately. */}}
{{- define "baton.preStop.sleep" -}}
preStop: {exec: {command: [sleep, {{ int .Values.drain.endpointPropagationSeconds | quote }}]}}
{{- end -}}

{{/*
The termination grace period: the preStop sleep, the drain time of the process, the wait after it, and ten seconds to exit.
Arguments: root, drain_s, after? (seconds)
*/}}
{{- define "baton.grace" -}}
{{- add (int .root.Values.drain.endpointPropagationSeconds) (include "baton.seconds" .drain_s | int) (default 0 .after | int) 10 -}}
{{- end -}}

{{/* Seconds after the drain: decode workers hand over running requests (5 s), prefill workers keep KV for readers (one lease). Arguments: root, pool */}}
{{- define "baton.afterDrain.worker" -}}
{{- $handOver := ternary 0 5 (eq .pool.role "prefill") -}}
{{- $lease := ternary 0 (include "baton.seconds" .root.Values.fleet.config.lease_s | int) (eq .pool.role "decode") -}}
{{- add $handOver $lease -}}
{{- end -}}

{{- define "baton.grace.worker" -}}
{{- include "baton.grace" (dict "root" .root "drain_s" .root.Values.fleet.config.drain_s "after" (include "baton.afterDrain.worker" .)) -}}
{{- end -}}

{{/* Timeout of the preStop drain of a worker. */}}
{{- define "baton.drainLimit.worker" -}}
{{- add (include "baton.seconds" .root.Values.fleet.config.drain_s | int) (include "baton.afterDrain.worker" . | int) -}}
{{- end -}}

{{/* The part of a pod spec that all pods share. Arguments: root, component, values, grace, pool? */}}
{{- define "baton.podSpec" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "baton.serviceAccountName" . }}
automountServiceAccountToken: false
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

{{/* The affinity from values, and for pools a preference for nodes near other workers. */}}
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

{{/* Metadata of a pod template. Arguments: root, component, values, pool?, checksum? */}}
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
