{{/* The config files of the services, in their loaders' own words. What the chart itself decides stands here and not in values. */}}

{{- define "baton.config.tls" -}}
{{- if .Values.tls.enabled }}
tls_cert: /etc/baton/tls/tls.crt
tls_key: /etc/baton/tls/tls.key
tls_ca: /etc/baton/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "baton.config.gateway" -}}
{{- include "baton.config.tls" . }}
{{- if .Values.frontTls.enabled }}
front_tls_cert: /etc/baton/front-tls/tls.crt
front_tls_key: /etc/baton/front-tls/tls.key
{{- end }}
{{- if .Values.apiKeys.enabled }}
api_keys: /etc/baton/api-keys/keys.yaml
{{- end }}
{{- end -}}

{{- define "baton.config.scheduler" -}}
{{- include "baton.config.tls" . }}
{{- end -}}

{{- define "baton.config.fleet" -}}
{{- include "baton.config.tls" . }}
ray_address: {{ include "baton.ray.address" . }}
ray_placement: role
{{- end -}}

{{/* How many workers of each role. Of a pool that scales the fewest: each pod that comes offers a place for one more. */}}
{{- define "baton.config.workers" -}}
{{- $count := dict "prefill" 0 "decode" 0 "hybrid" 0 -}}
{{- range (include "baton.pools" . | fromYaml).pools -}}
{{- $pods := ternary .autoscaling.minReplicas .replicas .autoscaling.enabled | int -}}
{{- $_ := set $count .role (add (get $count .role) $pods) -}}
{{- end -}}
{{- if not (or $count.hybrid (and $count.prefill $count.decode)) -}}
{{- fail "pools: there must be a pool of role prefill and one of role decode, or one of role hybrid" -}}
{{- end -}}
{{- toYaml $count -}}
{{- end -}}

{{/* What no worker is made anew for. A worker may take as long as the pool allows that allows most. */}}
{{- define "baton.config.ofFleet" -}}
{{- include "baton.config.workers" . }}
{{- $seconds := 0 -}}
{{- range (include "baton.pools" . | fromYaml).pools }}{{ $seconds = max $seconds (int .modelLoadSeconds) }}{{ end }}
worker_start_s: {{ $seconds }}
scale_with_nodes: {{ eq .Values.runtime.mode "ray-in-pods" }}
{{- end -}}

{{/* One service's settings. root, service */}}
{{- define "baton.config" -}}
{{- $own := (index .root.Values .service).config -}}
{{- $ours := include (printf "baton.config.%s" .service) .root | fromYaml -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.config) (deepCopy $own) $ours) -}}
{{- end -}}

{{/* A pod is made anew when its own settings change; workers not when there are more or fewer of them. */}}
{{- define "baton.config.checksum" -}}
checksum/config: {{ include "baton.config" . | sha256sum }}
{{- end -}}

{{/* What clients call the model. */}}
{{- define "baton.servedModel" -}}
{{- $settings := include "baton.config" (dict "root" . "service" "gateway") | fromYaml -}}
{{- default $settings.model $settings.served_model_name -}}
{{- end -}}
