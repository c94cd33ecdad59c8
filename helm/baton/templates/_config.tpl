{{/* The config files of the services. Settings that the chart determines are set here and not in values. */}}

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

{{/* The number of workers of each role. For an autoscaled pool it is the minimum: each new pod offers a place for one more. */}}
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

{{/* Settings whose change restarts no worker. The start timeout is the largest one of all pools. */}}
{{- define "baton.config.ofFleet" -}}
{{- include "baton.config.workers" . }}
{{- $seconds := 0 -}}
{{- range (include "baton.pools" . | fromYaml).pools }}{{ $seconds = max $seconds (int .modelLoadSeconds) }}{{ end }}
worker_start_s: {{ $seconds }}
scale_with_nodes: {{ eq .Values.runtime.mode "ray-in-pods" }}
{{- end -}}

{{/* The settings of one service. Arguments: root, service. Gloo cannot use a range of ports. */}}
{{- define "baton.config" -}}
{{- $own := (index .root.Values .service).config -}}
{{- $ours := include (printf "baton.config.%s" .service) .root | fromYaml -}}
{{- $all := mergeOverwrite (deepCopy .root.Values.config) (deepCopy $own) $ours -}}
{{- if eq (default "" $all.transfer) "collective" -}}{{- $all = omit $all "kv_port_range" -}}{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* A pod is restarted if its settings change, but workers are not restarted if their number changes. */}}
{{- define "baton.config.checksum" -}}
checksum/config: {{ include "baton.config" . | sha256sum }}
{{- end -}}

{{/* The model name that clients use. */}}
{{- define "baton.servedModel" -}}
{{- $settings := include "baton.config" (dict "root" . "service" "gateway") | fromYaml -}}
{{- default $settings.model $settings.served_model_name -}}
{{- end -}}
