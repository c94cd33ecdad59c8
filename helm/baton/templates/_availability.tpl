{{/* PodDisruptionBudget. None for a single pod, because it would block the drain of its node. Arguments: root, component, name, values, min, maxUnavailable, pool? */}}
{{- define "baton.pdb" -}}
{{- if and .values.pdb.enabled (gt (int .min) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* KEDA ScaledObject of a Deployment. Arguments: root, component, name, autoscaling, stabilization, triggers (list of query, threshold), pool? */}}
{{- define "baton.scaledObject" -}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .name }}
  minReplicaCount: {{ int .autoscaling.minReplicas }}
  maxReplicaCount: {{ int .autoscaling.maxReplicas }}
  pollingInterval: {{ int .root.Values.keda.pollingIntervalSeconds }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          # At least a cold start, else a pod that was just started would be removed again.
          stabilizationWindowSeconds: {{ int .stabilization }}
          policies:
            - {type: Pods, value: 1, periodSeconds: 60}
  triggers:
    {{- range .triggers }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ required "keda.prometheusAddress: the Prometheus that KEDA asks is needed" $.root.Values.keda.prometheusAddress | quote }}
        query: {{ .query | quote }}
        threshold: {{ .threshold | int | quote }}
    {{- end }}
{{- end -}}
