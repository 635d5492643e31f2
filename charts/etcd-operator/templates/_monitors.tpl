{{/* A PodMonitor for members. Call with (dict "root" $ "name" <name> "settings" <values> "namespaces" <list> "cluster"
     <EtcdCluster> "skip" <list>). Without "namespaces", the PodMonitor covers all namespaces. Without "cluster", the
     PodMonitor covers all clusters except those in "skip", whose entries have the form NAMESPACE/CLUSTER. */}}
{{- define "etcd-operator.memberMonitor" -}}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  {{- include "etcd-operator.metadata" (dict "root" .root "name" .name "component" "members" "labels" .settings.labels) | nindent 2 }}
spec:
  namespaceSelector:
    {{- if .namespaces }}
    matchNames:
    {{- toYaml .namespaces | nindent 4 }}
    {{- else }}
    any: true
    {{- end }}
  selector:
    matchLabels:
      app: etcd
      {{- with .cluster }}
      etcd_cluster: {{ . | quote }}
      {{- end }}
    {{- if not .cluster }}
    matchExpressions:
    - key: etcd_cluster
      operator: Exists
    {{- end }}
  podMetricsEndpoints:
  # Members serve their metrics without TLS on this port.
  - port: metrics
    {{- with .settings.interval }}
    interval: {{ . }}
    {{- end }}
    {{- with .settings.scrapeTimeout }}
    scrapeTimeout: {{ . }}
    {{- end }}
    relabelings:
    {{- range .skip }}
    # This cluster has a separate PodMonitor.
    - sourceLabels: [__meta_kubernetes_namespace, __meta_kubernetes_pod_label_etcd_cluster]
      separator: /
      regex: {{ regexQuoteMeta . | quote }}
      action: drop
    {{- end }}
    - sourceLabels: [__meta_kubernetes_pod_label_etcd_cluster]
      targetLabel: cluster
    {{- with .settings.relabelings }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .settings.metricRelabelings }}
    metricRelabelings:
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
