{{/* Names, labels and images. */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all object names. At most 35 characters, because NAME-worker-POOL must fit into a label value. */}}
{{- define "baton.fullname" -}}
{{- $name := include "baton.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- end -}}

{{/* Selector labels of pods, in every mode. Arguments: root, component, pool? */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
baton.internal/pool: {{ .name }}
{{- end }}
{{- end -}}

{{/* Labels of pods. None depends on the chart's version, else every release would restart all workers. Arguments: root, component, pool? */}}
{{- define "baton.podLabels" -}}
{{ include "baton.selector" . }}
{{- with .pool }}
baton.internal/role: {{ .role }}
{{- end }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of other objects. Arguments: root, component, pool? */}}
{{- define "baton.labels" -}}
{{ include "baton.podLabels" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Metadata of an object. Arguments: root, component, name, pool?, annotations?, labels? */}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The reference of an image, from a map of registry, repository, tag and digest. */}}
{{- define "baton.imageReference" -}}
{{- $name := ternary .repository (printf "%s/%s" .registry .repository) (empty .registry) -}}
{{- if .digest }}{{ $name }}@{{ .digest }}{{ else }}{{ $name }}:{{ .tag }}{{ end -}}
{{- end -}}

{{/* Baton's image. Arguments: root, image? (overrides) */}}
{{- define "baton.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (deepCopy (default dict .image)) -}}
{{- $tag := default (printf "%s-%s" .root.Chart.AppVersion $image.variant) $image.tag -}}
{{- include "baton.imageReference" (mergeOverwrite $image (dict "tag" $tag)) -}}
{{- end -}}

{{- define "baton.pullPolicy" -}}
{{- (mergeOverwrite (deepCopy .root.Values.image) (deepCopy (default dict .image))).pullPolicy -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- /* The download Job runs before the ServiceAccounts exist. */ -}}
{{- if and .root.Values.serviceAccounts.create (ne .component "fetch") }}{{ include "baton.fullname" .root }}-{{ .component }}{{ else }}default{{ end -}}
{{- end -}}

{{/* Names of Secrets: the existing or the generated one. */}}
{{- define "baton.secret.apiKeys" -}}
{{- default (printf "%s-api-keys" (include "baton.fullname" .)) .Values.apiKeys.existingSecret -}}
{{- end -}}
{{- define "baton.secret.tls" -}}
{{- default (printf "%s-tls" (include "baton.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}
{{- define "baton.secret.frontTls" -}}
{{- default (printf "%s-front-tls" (include "baton.fullname" .)) .Values.frontTls.existingSecret -}}
{{- end -}}
{{- define "baton.secret.ray" -}}
{{- default (printf "%s-ray" (include "baton.fullname" .)) .Values.ray.existingSecret -}}
{{- end -}}

{{/* DNS names in the certificate of the gateway's ports: {names: […]}. */}}
{{- define "baton.front.names" -}}
{{- $service := printf "%s-gateway" (include "baton.fullname" .) -}}
{{- $ofService := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) -}}
{{- toYaml (dict "names" (default $ofService .Values.frontTls.dnsNames)) -}}
{{- end -}}

{{/* The name that clients inside the cluster verify in the certificate. */}}
{{- define "baton.front.name" -}}
{{- (include "baton.front.names" . | fromYaml).names | first | replace "*." "any." -}}
{{- end -}}

{{/* "true" if the bundled Redis is used. */}}
{{- define "baton.redis.isBundled" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}true{{ end -}}
{{- end -}}

{{/* The pools, merged over their defaults: {pools: […]}. */}}
{{- define "baton.pools" -}}
{{- $pools := list -}}
{{- $names := dict -}}
{{- range .Values.pools -}}
{{- if hasKey $names .name }}{{ fail (printf "pools: two pools are called %q" .name) }}{{ end -}}
{{- $_ := set $names .name true -}}
{{- $pools = append $pools (mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy .)) -}}
{{- end -}}
{{- toYaml (dict "pools" $pools) -}}
{{- end -}}

{{/* Address of Ray's head. */}}
{{- define "baton.ray.address" -}}
{{- $service := ternary "head-svc" "ray-head" (eq .Values.runtime.mode "kuberay") -}}
{{ include "baton.fullname" . }}-{{ $service }}:{{ int .Values.ray.port }}
{{- end -}}

{{/* A duration in seconds, rounded up to an integer. */}}
{{- define "baton.seconds" -}}
{{- ceil . | int -}}
{{- end -}}
