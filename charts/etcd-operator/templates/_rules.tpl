{{/* The rights of an operator in the namespaces that it serves. Call with (dict "root" $ "operator" <name of the
     binary>). */}}
{{- define "etcd-operator.rules" -}}
{{- $operator := .operator }}
{{- if eq $operator "etcd-operator" }}
- apiGroups: [etcd.database.coreos.com]
  # patch: the finalizer of EtcdClusters with deletionPolicy: BackupThenDelete.
  resources: [etcdclusters]
  verbs: [get, list, watch, patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdclusters/status]
  verbs: [patch]
- apiGroups: [etcd.database.coreos.com]
  # patch: only the finalizer.
  resources: [etcdroles, etcdusers]
  verbs: [get, list, watch, patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdroles/status, etcdusers/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods, persistentvolumeclaims, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  # To change CPU and memory of running pods.
  resources: [pods/resize]
  verbs: [patch]
- apiGroups: [""]
  # Secrets of spec.TLS, spec.auth and EtcdUsers, and Secrets that the operator generates. The operator reads Secrets by
  # name, and neither lists nor watches them.
  resources: [secrets]
  verbs: [get, create, update, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  # For clusters with spec.networkPolicy.
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  # The gRPC proxies of spec.grpcProxy.
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
{{- if .root.Values.certManager.enabled }}
- apiGroups: [cert-manager.io]
  # For clusters with spec.TLS.certManager.
  resources: [certificates]
  verbs: [get, list, create, patch, delete]
- apiGroups: [cert-manager.io]
  # To report a missing issuer.
  resources: [issuers{{ if .root.Values.clusterWide }}, clusterissuers{{ end }}]
  verbs: [get]
{{- end }}
{{- else if eq $operator "etcd-backup-operator" }}
- apiGroups: [etcd.database.coreos.com]
  # create: the EtcdBackup of EtcdCluster.spec.backup. delete: that EtcdBackup, and finished EtcdBackups after their TTL.
  # patch: the finalizer of EtcdBackups with deletionPolicy: Delete.
  resources: [etcdbackups]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [etcd.database.coreos.com]
  # The status of EtcdClusters contains lastBackup, backupForChanges and backupRequest.
  resources: [etcdbackups/status, etcdclusters/status]
  verbs: [patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdclusters]
  verbs: [get, list, watch]
- apiGroups: [etcd.database.coreos.com]
  # patch: the finalizer of EtcdMirrors.
  resources: [etcdmirrors]
  verbs: [get, list, watch, patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdmirrors/status]
  verbs: [patch]
- apiGroups: [""]
  # Pods that mount a PVC and write or remove backups. list: finds the pod of the agent of spec.continuous.
  resources: [pods]
  verbs: [get, list, create, delete]
- apiGroups: [apps]
  # The Deployment of the agent of spec.continuous.
  resources: [deployments]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  # To report why the pod of a backup does not start.
  resources: [events]
  verbs: [list]
- apiGroups: [""]
  # To check that the PVC of an EtcdBackup exists.
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  # Credentials that an EtcdBackup or an EtcdMirror names.
  resources: [secrets]
  verbs: [get]
{{- else if eq $operator "etcd-restore-operator" }}
- apiGroups: [etcd.database.coreos.com]
  # patch: only the finalizer. delete: finished EtcdRestores after ttlSecondsAfterFinished.
  resources: [etcdrestores]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdrestores/status, etcdclusters/status]
  verbs: [patch]
- apiGroups: [etcd.database.coreos.com]
  # The restored cluster: create it, lock it with an annotation, and remove the annotation at the handover.
  resources: [etcdclusters]
  verbs: [get, list, watch, create, patch]
- apiGroups: [etcd.database.coreos.com]
  resources: [etcdbackups]
  verbs: [get]
- apiGroups: [""]
  # Pods of seeds. A restore in place also deletes the pods of the members that it replaces.
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims, services]
  verbs: [get, create, delete]
- apiGroups: [""]
  # Credentials that an EtcdRestore names.
  resources: [secrets]
  verbs: [get]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* A Role or ClusterRole with these rights, and its binding. Call with (dict "root" $ "operator" <name of the binary>
     "account" <ServiceAccount> "kind" <Role or ClusterRole> "name" <name> "namespace" <of the Role>). */}}
{{- define "etcd-operator.role" -}}
{{- $marks := include "etcd-operator.marks" (dict "root" .root "component" .operator) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  {{- $marks | nindent 2 }}
rules:
{{- include "etcd-operator.rules" . }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  {{- $marks | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name }}
subjects:
- kind: ServiceAccount
  name: {{ .account }}
  namespace: {{ include "etcd-operator.namespace" .root | quote }}
{{- end }}
