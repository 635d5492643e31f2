{{/* Labels of every object. Call with (dict "root" $ "name" <operator or part>). */}}
{{- define "etcd-operator.labels" -}}
{{ include "etcd-operator.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels that never change, for selectors. */}}
{{- define "etcd-operator.selector" -}}
app.kubernetes.io/name: etcd-operator
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "etcd-operator.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The three operators that are enabled, by the names of their binaries. */}}
{{- define "etcd-operator.enabled" -}}
{{- $all := dict "etcd-operator" .Values.clusterOperator "etcd-backup-operator" .Values.backupOperator "etcd-restore-operator" .Values.restoreOperator }}
{{- $enabled := dict }}
{{- range $name, $settings := $all }}
{{- if $settings.enabled }}{{ $_ := set $enabled $name $settings }}{{ end }}
{{- end }}
{{- toYaml $enabled }}
{{- end }}

{{/* Name of an operator's service account. Call with (dict "name" <operator> "settings" <its settings>). */}}
{{- define "etcd-operator.serviceAccount" -}}
{{- if .settings.serviceAccount.create }}
{{- .settings.serviceAccount.name | default .name }}
{{- else }}
{{- required (printf "the operator %s needs serviceAccount.name when serviceAccount.create is false" .name) .settings.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* What each operator may do with objects in the namespaces it serves. */}}
{{- define "etcd-operator.rules" -}}
{{- if eq . "etcd-operator" }}
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdclusters]
  verbs: [get, list, watch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdclusters/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods, persistentvolumeclaims, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  # CPU and memory of running pods.
  resources: [pods/resize]
  verbs: [patch]
- apiGroups: [""]
  # The certificates spec.TLS names, and those of spec.TLS.generated, one by one: no list, no watch.
  resources: [secrets]
  verbs: [get, create, update, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  # Those of clusters with spec.networkPolicy.
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- else if eq . "etcd-backup-operator" }}
- apiGroups: [etcd.database.coreos.com]
  # create and delete: those that EtcdCluster.spec.backup asks for, and finished ones after their time. patch: the
  # finalizer, where stored backups go with their object.
  resources: [etcdbackups]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [etcd.database.coreos.com]
  # On clusters: lastBackup.
  resources: [etcdbackups/status, etcdclusters/status]
  verbs: [patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdclusters]
  verbs: [get, list, watch]
- apiGroups: [""]
  # The pods that mount a claim and write a backup to it, or remove one.
  resources: [pods]
  verbs: [get, create, delete]
- apiGroups: [""]
  # Whether the claim is there that an EtcdBackup names.
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  # The credentials an EtcdBackup names.
  resources: [secrets]
  verbs: [get]
{{- else if eq . "etcd-restore-operator" }}
- apiGroups: [etcd.database.coreos.com]
  # Patched for its finalizer alone, deleted after ttlSecondsAfterFinished.
  resources: [etcdrestores]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdrestores/status, etcdclusters/status]
  verbs: [patch]
- apiGroups: [etcd.database.coreos.com]
  # The restored cluster is made, claimed by an annotation, and handed over by its removal.
  resources: [etcdclusters]
  verbs: [get, list, watch, create, patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdbackups]
  verbs: [get]
- apiGroups: [""]
  # The seed member; in a restore in place also the pods of the members that it replaces, and a seed that was given up.
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims, services]
  verbs: [get, create, delete]
- apiGroups: [""]
  # The credentials an EtcdRestore names.
  resources: [secrets]
  verbs: [get]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* The definition each operator serves. */}}
{{- define "etcd-operator.crd" -}}
{{- get (dict "etcd-operator" "etcdclusters" "etcd-backup-operator" "etcdbackups" "etcd-restore-operator" "etcdrestores") . }}.etcd.database.coreos.com
{{- end }}
